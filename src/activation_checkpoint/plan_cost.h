// Cost functions that the solver and the simulation of a plan share.
#pragma once

#include <algorithm>

#include "hasten/activation_checkpoint/planner.h"

namespace hasten::detail {

/// Peak of a block at the end of a recomputation, with its backward.
inline int64_t alone_bytes(const BlockProfile& block) {
  return block.recompute_peak > 0 ? block.recompute_peak
                                  : block.output_bytes + block.saved_bytes +
                                        std::max(block.forward_extra, block.backward_extra);
}

/// The plans with which others are compared: keep everything, sqrt(n) regions, each block.
struct SimplePlan {
  const char* name = "";
  std::vector<PlanRegion> regions{};
};
std::vector<SimplePlan> simple_plans(const ChainProfile& profile);

/// Cost of one forward and backward. observe_peak() returns its peak.
PlanCost observe_step(const std::shared_ptr<torch::nn::Module>& model,
                      const std::function<at::Tensor()>& loss);

} // namespace hasten::detail
