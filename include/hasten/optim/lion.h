// Lion: updates by the sign of a running mean. fused_optimizer.h describes what all optimizers
// share.
#pragma once

#include <tuple>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

struct LionOptions : detail::SavedOptions<LionOptions> {
  using betas_t = std::tuple<double, double>;
  LionOptions(double lr = 1e-4) : lr_(lr) {}
  /// Learning rate, >= 0. Use a third to a tenth of AdamW's and as many times its weight decay.
  TORCH_ARG(double, lr);
  /// Coefficients of the mean in the update and of the mean that is kept; 0 <= beta < 1.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  /// Decoupled weight decay, >= 0.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  static void fields(auto& of, const auto& field) {
    field("lr", of.lr());
    field("betas", of.betas());
    field("weight_decay", of.weight_decay());
  }
};

struct LionParamState final : detail::SavedState<LionParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, master);

 public:
  static void fields(auto& of, const auto& field) {
    field("step", of.step());
    field("exp_avg", of.exp_avg());
    field("master", of.master());
  }
};

/// Chen et al., arXiv 2302.06675, algorithm 2:
///   p <- p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)
///   m <- beta2 m + (1 - beta2) g
/// Memory: one tensor like each parameter. If a parameter group has options, these replace all
/// defaults.
class Lion : public detail::SteppedByEngine<torch::optim::Optimizer, LionOptions, LionParamState> {
 public:
  using SteppedByEngine::SteppedByEngine;
};

} // namespace hasten
