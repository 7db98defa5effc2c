// LAMB: Adam with a step as long as each tensor asks for. See fused_optimizer.h for what it shares
// with the other optimizers.
#pragma once

#include <tuple>
#include <vector>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

struct LambOptions : detail::SavedOptions<LambOptions> {
  using betas_t = std::tuple<double, double>;
  LambOptions(double lr = 1e-3) : lr_(lr) {}
  /// >= 0.
  TORCH_ARG(double, lr);
  /// Of the mean and the mean square; 0 <= beta < 1.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the root, >= 0.
  TORCH_ARG(double, eps) = 1e-6;
  /// In the direction, before its length is taken; >= 0.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  static void fields(auto& of, const auto& field) {
    field("lr", of.lr());
    field("betas", of.betas());
    field("eps", of.eps());
    field("weight_decay", of.weight_decay());
  }
};

struct LambParamState final : detail::SavedState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, master);

 public:
  static void fields(auto& of, const auto& field) {
    field("step", of.step());
    field("exp_avg", of.exp_avg());
    field("exp_avg_sq", of.exp_avg_sq());
    field("master", of.master());
  }
};

/// You and others, arXiv 1904.00962, algorithm 2, with |x| for phi:
///   r = m' / (sqrt(v') + eps) + weight_decay p, m' and v' without their bias,
///   p <- p - lr |p| / |r| r, for each tensor; the ratio is 1 where one is 0.
/// Memory: two tensors like each parameter. Cost: two passes, 1.6 times AdamW's
/// traffic. A group's own options replace the defaults as a whole.
class Lamb : public detail::SteppedByEngine<torch::optim::Optimizer, LambOptions, LambParamState> {
 public:
  using SteppedByEngine::SteppedByEngine;
};

} // namespace hasten
