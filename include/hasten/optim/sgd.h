// torch::optim::SGD with the same options, state and files, but with a step of one pass over
// memory: see fused_optimizer.h.
#pragma once

#include <torch/optim/sgd.h>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

/// torch's state and the number of completed steps, which only stochastic rounding reads.
struct SGDParamState final : torch::optim::SGDParamState {
  SGDParamState() = default;
  explicit SGDParamState(const torch::optim::SGDParamState& state)
      : torch::optim::SGDParamState(state) {}
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, master);
};

/// SGD with momentum, dampening, Nesterov momentum and L2 weight decay as PyTorch defines them.
/// Equal to torch::optim::SGD within rounding.
/// Memory: one tensor like each parameter with momentum, none without.
class SGD
    : public detail::SteppedByEngine<torch::optim::SGD, torch::optim::SGDOptions, SGDParamState> {
 public:
  using SteppedByEngine::SteppedByEngine;
};

} // namespace hasten
