// A communicator that forwards every call to another one. Derived classes add code before or
// after an operation.
// Threading and lifetime: like the inner communicator, which it shares.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "hasten/comm/communicator.h"

namespace hasten {

class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  const CommunicatorOptions& options() const override { return inner_->options(); }
  Work start(const Collective& what) override {
    entered(what.kind_name(), what.name, what.shared());
    return started(what.name, inner_->start(what));
  }
  Work start_together(const std::vector<Collective>& what) override {
    for (const Collective& one : what) {
      entered(one.kind_name(), one.name, one.shared());
    }
    return started(what.empty() ? std::string_view() : what.front().name,
                   inner_->start_together(what));
  }
  at::Tensor allocate_tensor(int64_t numel, const at::TensorOptions& options) override {
    return inner_->allocate_tensor(numel, options);
  }
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override {
    entered("all_gather_rows", name, {}); // dim 0 may differ
    return inner_->all_gather_rows(rows, name);
  }
  std::vector<nlohmann::json> exchange(std::string_view operation, std::string_view name,
                                       const nlohmann::json& value) override {
    entered(operation, name, {});
    return inner_->exchange(operation, name, value);
  }
  void barrier(std::string_view name) override {
    entered("barrier", name, {});
    inner_->barrier(name);
  }
  void check(std::string_view name) override { inner_->check(name); }
  using Communicator::abort;
  void abort(std::string_view reason, ErrorKind kind) noexcept override {
    inner_->abort(reason, kind);
  }
  void close() noexcept override { inner_->close(); }
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    return inner_->duplicate(options);
  }
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override {
    return inner_->new_group(ranks, options);
  }
  std::optional<Survivors> shrink() override { return inner_->shrink(); }

 protected:
  std::vector<int> host_members() const override { return detail::ranks_of_host(*inner_); }
  /// Called before an operation. `tensor` has the same shape and dtype on all ranks; it is
  /// undefined for operations without such a tensor.
  virtual void entered(std::string_view /*operation*/, std::string_view /*name*/,
                       const at::Tensor& /*tensor*/) {}
  /// Called after an operation with a handle has started. Returns the handle for the caller.
  virtual Work started(std::string_view, Work handle) { return handle; }

  const std::shared_ptr<Communicator> inner_;
};

} // namespace hasten
