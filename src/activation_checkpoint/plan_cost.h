// What the solver and the walk over a plan count alike, and what a step takes.
#pragma once

#include <algorithm>

#include "hasten/activation_checkpoint/planner.h"

namespace hasten::detail {

/// Of a block at the end of a recomputation, and of its backward.
inline int64_t alone_bytes(const BlockProfile& block) {
  return block.unit_bytes + (block.recompute_peak > 0
                                 ? block.recompute_peak
                                 : block.output_bytes + block.saved_bytes +
                                       std::max(block.forward_extra, block.backward_extra));
}

/// Of one forward and backward; as observe_peak, which is its first.
struct StepCost {
  int64_t peak_bytes = 0;
  double seconds = 0;
};
StepCost observe_step(const std::shared_ptr<torch::nn::Module>& model,
                      const std::function<at::Tensor()>& loss);

} // namespace hasten::detail
