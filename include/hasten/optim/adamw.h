// torch::optim::AdamW with the same options, state and files, whose step is
// one fused kernel over lists of tensors.
// Threading: one thread. Lifetime: shares ownership of the parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

#include <vector>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101) as PyTorch defines it. Equal
/// to torch::optim::AdamW within rounding (1e-6 after 20 steps), several times
/// as fast: no temporaries, one pass over parameter, gradient and moments.
///
/// What it does otherwise:
/// - A parameter listed twice (tied weights) is updated once.
/// - A parameter written by step() counts as changed, so that a step between a
///   forward and its backward is an error as with torch's own.
///
/// Options: torch::optim::AdamWOptions(lr).betas({…}).eps(…).weight_decay(…)
/// .amsgrad(…). Trap, torch's: a group's option that equals the constructor's
/// default (weight_decay 0.01, lr 1e-3) is taken for unset and inherits
/// `defaults`; give both the same value.
/// Memory: two tensors like each parameter (three with amsgrad), made at the
/// first step() in which it has a gradient.
class AdamW : public torch::optim::AdamW, public FusedOptimizer {
 public:
  explicit AdamW(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      torch::optim::AdamWOptions defaults = {});
  explicit AdamW(
      std::vector<at::Tensor> parameters,
      torch::optim::AdamWOptions defaults = {});

  /// One update of every parameter with a defined gradient; the gradients stay
  /// as they are. Returns the closure's loss, or an undefined tensor. Local.
  /// Gradients have their parameter's dtype. Throws InputError for a sparse
  /// one and for parameters whose memory has holes.
  at::Tensor step(LossClosure closure = nullptr) override;
  void step_scaled(double factor) override;

 private:
  /// Drops repeated parameters from the groups that were added since.
  void drop_repeated_parameters();
  void update(double factor);

  size_t known_parameters_ = 0; // over all groups, after dropping
};

} // namespace hasten
