// A communicator that lets a test step in before and after each operation: for
// ranks that die in the middle of something.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten::testing_support {

class WatchedCommunicator final : public Communicator {
 public:
  explicit WatchedCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  std::function<void(std::string_view name)> before{};
  /// Of those that have a handle: the operation has been started.
  std::function<void(std::string_view name, CommHandle&)> after{};
  std::function<void()> before_shrink{};

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  const CommunicatorOptions& options() const override { return inner_->options(); }
  CommHandle all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name) override {
    return watch(name, [&] { return inner_->all_reduce_async(std::move(tensor), op, name); });
  }
  CommHandle broadcast_async(at::Tensor tensor, int source, std::string_view name) override {
    return watch(name, [&] { return inner_->broadcast_async(std::move(tensor), source, name); });
  }
  CommHandle all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) override {
    return watch(
        name, [&] { return inner_->all_gather_async(std::move(output), std::move(input), name); });
  }
  CommHandle gather_async(at::Tensor output, at::Tensor input, int root,
                          std::string_view name) override {
    return watch(name, [&] {
      return inner_->gather_async(std::move(output), std::move(input), root, name);
    });
  }
  CommHandle all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) override {
    return watch(
        name, [&] { return inner_->all_to_all_async(std::move(output), std::move(input), name); });
  }
  CommHandle reduce_async(at::Tensor tensor, int root, ReduceOp op,
                          std::string_view name) override {
    return watch(name, [&] { return inner_->reduce_async(std::move(tensor), root, op, name); });
  }
  CommHandle scatter_async(at::Tensor output, at::Tensor input, int root,
                           std::string_view name) override {
    return watch(name, [&] {
      return inner_->scatter_async(std::move(output), std::move(input), root, name);
    });
  }
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override {
    say(name);
    return inner_->all_gather_rows(rows, name);
  }
  std::vector<nlohmann::json> gather_json(const nlohmann::json& value,
                                          std::string_view name) override {
    say(name);
    return inner_->gather_json(value, name);
  }
  nlohmann::json broadcast_json(const nlohmann::json& value, std::string_view name) override {
    say(name);
    return inner_->broadcast_json(value, name);
  }
  void barrier(std::string_view name) override {
    say(name);
    inner_->barrier(name);
  }
  void abandon(std::string_view reason) noexcept override { inner_->abandon(reason); }
  void close() noexcept override { inner_->close(); }
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    return inner_->duplicate(options);
  }
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override {
    return inner_->new_group(ranks, options);
  }
  std::optional<Survivors> shrink() override {
    if (before_shrink) {
      before_shrink();
    }
    return inner_->shrink();
  }

 private:
  void say(std::string_view name) const {
    if (before) {
      before(name);
    }
  }
  template <typename Start>
  CommHandle watch(std::string_view name, const Start& start) {
    say(name);
    CommHandle handle = start();
    if (after) {
      after(name, handle);
    }
    return handle;
  }

  std::shared_ptr<Communicator> inner_;
};

} // namespace hasten::testing_support
