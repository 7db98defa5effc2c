// A communicator that lets a test step in before and after each operation: for
// ranks that die in the middle of something.
#pragma once

#include <functional>
#include <string_view>

#include "hasten/comm/forwarding_communicator.h"

namespace hasten::testing_support {

class WatchedCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  std::function<void(std::string_view name)> before{};
  /// Of those that have a handle: the operation has been started.
  std::function<void(std::string_view name, Work&)> after{};
  std::function<void()> before_shrink{};

  std::optional<Survivors> shrink() override {
    if (before_shrink) {
      before_shrink();
    }
    return ForwardingCommunicator::shrink();
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
