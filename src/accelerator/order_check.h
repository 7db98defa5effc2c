// For AcceleratorOptions::debug: a communicator that remembers what was called,
// so that ranks can compare.
// Threading: one thread. Lifetime: shares the group it stands before.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

class OrderCheck final : public Communicator {
 public:
  explicit OrderCheck(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  /// Compares the calls since the last compare(), and `more`, an object of named
  /// values, over the ranks. Collective, blocking, through the store.
  /// Throws CommunicationError, on every rank, naming the first that differs.
  void compare(const nlohmann::json& more);

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  const CommunicatorOptions& options() const override { return inner_->options(); }
  CommHandle all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name) override;
  CommHandle broadcast_async(at::Tensor tensor, int source, std::string_view name) override;
  CommHandle all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) override;
  CommHandle gather_async(at::Tensor output, at::Tensor input, int root,
                          std::string_view name) override;
  CommHandle all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) override;
  CommHandle reduce_async(at::Tensor tensor, int root, ReduceOp op, std::string_view name) override;
  CommHandle scatter_async(at::Tensor output, at::Tensor input, int root,
                           std::string_view name) override;
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override;
  std::vector<nlohmann::json> gather_json(const nlohmann::json& value,
                                          std::string_view name) override;
  nlohmann::json broadcast_json(const nlohmann::json& value, std::string_view name) override;
  void barrier(std::string_view name) override;
  void abandon(std::string_view reason) noexcept override { inner_->abandon(reason); }
  void close() noexcept override { inner_->close(); }
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    return inner_->duplicate(options); // an order of its own
  }
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override {
    return inner_->new_group(ranks, options);
  }
  std::optional<Survivors> shrink() override {
    const auto left = inner_->shrink();
    if (left) { // ranks were at different calls when it failed
      calls_.clear();
      compared_ = 0;
    }
    return left;
  }

 private:
  void note(std::string_view operation, std::string_view name);
  // Shape and dtype too: equal on all ranks.
  void note(std::string_view operation, std::string_view name, const at::Tensor& tensor);

  const std::shared_ptr<Communicator> inner_;
  std::vector<std::string> calls_; // since the last compare()
  uint64_t compared_ = 0; // calls before them
};

} // namespace hasten::detail
