// For AcceleratorOptions::debug: a communicator that records its calls so that ranks can compare
// them. Threading: one thread. Lifetime: shares the group that it wraps.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/comm/forwarding_communicator.h"

namespace hasten::detail {

class OrderCheck final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  /// Compares the calls since the last compare(), and `more`, an object of named
  /// values, over the ranks. Collective, blocking, through the store.
  /// Throws CommunicationError, on every rank, naming the first that differs.
  void compare(const nlohmann::json& more);

  std::optional<Survivors> shrink() override {
    const auto left = inner_->shrink();
    if (left) { // ranks were at different calls when it failed
      calls_.clear();
      compared_ = 0;
    }
    return left;
  }

 private:
  void entered(std::string_view operation, std::string_view name,
               const at::Tensor& tensor) override;

  std::vector<std::string> calls_; // since the last compare()
  uint64_t compared_ = 0; // calls before them
};

} // namespace hasten::detail
