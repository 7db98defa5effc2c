// LAMB: Adam with a layer-wise step length. fused_optimizer.h describes what all optimizers share.
#pragma once

#include <tuple>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

struct LambOptions : detail::SavedOptions<LambOptions> {
  using betas_t = std::tuple<double, double>;
  LambOptions(double lr = 1e-3) : lr_(lr) {}
  /// Learning rate, >= 0.
  TORCH_ARG(double, lr);
  /// Coefficients of the running mean and mean square; 0 <= beta < 1.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the square root, >= 0.
  TORCH_ARG(double, eps) = 1e-6;
  /// Added to the direction before its norm is computed; >= 0.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  static void fields(auto& of, const auto& field) {
    field("lr", of.lr());
    field("betas", of.betas());
    field("eps", of.eps());
    field("weight_decay", of.weight_decay());
  }
};

using LambParamState = detail::MeansState;

/// You et al., arXiv 1904.00962, algorithm 2, with |x| for phi:
///   r = m' / (sqrt(v') + eps) + weight_decay p, m' and v' bias-corrected,
///   p <- p - lr |p| / |r| r, for each tensor; the ratio is 1 if |p| or |r| is 0.
/// Memory: two tensors like each parameter. Cost: two passes, 1.6 times the memory traffic of
/// AdamW. If a parameter group has options, these replace all defaults.
class Lamb : public detail::SteppedByEngine<torch::optim::Optimizer, LambOptions, LambParamState> {
 public:
  using SteppedByEngine::SteppedByEngine;
};

} // namespace hasten
