// A communicator that calls functions of the test before and after each operation, for example to
// let a rank die there.
#pragma once

#include <functional>
#include <string_view>

#include "hasten/comm/forwarding_communicator.h"

namespace hasten::testing_support {

class WatchedCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  std::function<void(std::string_view name)> before{};
  /// For operations with a handle: the operation has started.
  std::function<void(std::string_view name, Work&)> after{};
  std::function<void()> before_shrink{};

  std::optional<Survivors> shrink() override {
    if (before_shrink) {
      before_shrink();
    }
    return ForwardingCommunicator::shrink();
  }
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    auto watched =
        std::make_shared<WatchedCommunicator>(ForwardingCommunicator::duplicate(options));
    watched->before = before;
    watched->after = after;
    return watched;
  }

 private:
  void entered(std::string_view, std::string_view name, const at::Tensor&) override {
    if (before) {
      before(name);
    }
  }
  Work started(std::string_view name, Work handle) override {
    if (after) {
      after(name, handle);
    }
    return handle;
  }
};

} // namespace hasten::testing_support
