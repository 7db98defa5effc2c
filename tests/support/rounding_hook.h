// A communication hook with state.
#pragma once

#include <ATen/ATen.h>

#include "hasten/parallel/comm_hook.h"

namespace hasten::testing_support {

/// Rounds gradients to bf16 before it sums them, and adds to each what the last rounding lost.
class RoundingHook final : public CommHook {
 public:
  Step reduce(Communicator& communicator, const GradientBucket& bucket) override {
    for (const BucketGradient& entry : bucket.gradients) {
      const auto lost = lost_.find(entry.name);
      const at::Tensor whole = lost == lost_.end()
                                   ? entry.gradient.clone()
                                   : entry.gradient + lost->second.to(entry.gradient.device());
      entry.gradient.copy_(whole.to(at::kBFloat16));
      lost_[entry.name] = whole - entry.gradient;
    }
    return [sum = communicator.all_reduce_async(bucket.buffer, ReduceOp::SUM, "bucket")]() mutable {
      sum.wait();
      return false;
    };
  }
  std::string description() const override { return "rounding"; }
  void reset() override { lost_.clear(); }
  void save_state(NamedTensors& tensors, nlohmann::json&) const override {
    for (const auto& [name, lost] : lost_) {
      tensors["lost." + name] = lost;
    }
  }
  void load_state(const NamedTensors& tensors, const nlohmann::json&) override {
    lost_.clear();
    for (const auto& [name, lost] : tensors) {
      lost_[name.substr(5)] = lost.clone();
    }
  }

 private:
  NamedTensors lost_{};
};

} // namespace hasten::testing_support
