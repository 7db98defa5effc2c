// Adafactor: keeps mean squares by row and column instead of one per element. fused_optimizer.h
// describes what all optimizers share.
#pragma once

#include <optional>
#include <tuple>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

/// Names and defaults of transformers' Adafactor, except for lr.
struct AdafactorOptions : detail::SavedOptions<AdafactorOptions> {
  using eps_t = std::tuple<double, double>;
  using beta1_t = std::optional<double>;
  AdafactorOptions(double lr = 1e-3) : lr_(lr) {}
  /// Learning rate, >= 0; ignored with relative_step.
  TORCH_ARG(double, lr);
  /// First: added to squared gradients, > 0. Second: lower bound of a parameter's RMS.
  TORCH_ARG(eps_t, eps) = std::make_tuple(1e-30, 1e-3);
  /// Upper bound of the RMS of an update, before lr, > 0.
  TORCH_ARG(double, clip_threshold) = 1.0;
  /// beta2 = 1 - step^decay_rate; below 0.
  TORCH_ARG(double, decay_rate) = -0.8;
  /// Coefficient of a running mean of updates, which costs one tensor like each parameter. Unset:
  /// no mean.
  TORCH_ARG(beta1_t, beta1) = std::nullopt;
  /// Decoupled weight decay, >= 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// Multiplies the learning rate by the parameter's RMS.
  TORCH_ARG(bool, scale_parameter) = true;
  /// Uses the learning rate min(1e-2, 1 / sqrt(step)), or with warmup_init min(1e-6 step, 1 /
  /// sqrt(step)).
  TORCH_ARG(bool, relative_step) = true;
  TORCH_ARG(bool, warmup_init) = false;

 public:
  static void fields(auto& of, const auto& field) {
    field("lr", of.lr());
    field("eps", of.eps());
    field("clip_threshold", of.clip_threshold());
    field("decay_rate", of.decay_rate());
    field("beta1", of.beta1());
    field("weight_decay", of.weight_decay());
    field("scale_parameter", of.scale_parameter());
    field("relative_step", of.relative_step());
    field("warmup_init", of.warmup_init());
  }
};

/// State of one parameter. With two dimensions or more it has rows and columns of the last two.
struct AdafactorParamState final : detail::SavedState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg_sq_row);
  TORCH_ARG(at::Tensor, exp_avg_sq_col);
  TORCH_ARG(at::Tensor, exp_avg_sq); // only with fewer dimensions
  TORCH_ARG(at::Tensor, exp_avg); // only with beta1
  TORCH_ARG(at::Tensor, master);

 public:
  static void fields(auto& of, const auto& field) {
    field("step", of.step());
    field("exp_avg_sq_row", of.exp_avg_sq_row());
    field("exp_avg_sq_col", of.exp_avg_sq_col());
    field("exp_avg_sq", of.exp_avg_sq());
    field("exp_avg", of.exp_avg());
    field("master", of.master());
  }
};

/// Shazeer and Stern, arXiv 1804.04235, as implemented in transformers' Adafactor.
/// Memory: rows + columns of each matrix. Cost: three passes over the gradient.
/// If a parameter group has options, these replace all defaults.
class Adafactor : public detail::SteppedByEngine<torch::optim::Optimizer, AdafactorOptions,
                                                 AdafactorParamState> {
 public:
  using SteppedByEngine::SteppedByEngine;
};

} // namespace hasten
