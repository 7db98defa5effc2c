// Adafactor: mean squares by row and column instead of one for each number. See
// fused_optimizer.h for what it shares with the other optimizers.
#pragma once

#include <torch/optim/serialize.h>

#include <optional>
#include <tuple>
#include <vector>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

/// Names and defaults of transformers' Adafactor, but for lr.
struct AdafactorOptions : torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  using eps_t = std::tuple<double, double>;
  using beta1_t = std::optional<double>;
  AdafactorOptions(double lr = 1e-3) : lr_(lr) {}
  /// >= 0; not read with relative_step.
  TORCH_ARG(double, lr);
  /// Added to squared gradients (> 0); least RMS of a parameter.
  TORCH_ARG(eps_t, eps) = std::make_tuple(1e-30, 1e-3);
  /// Largest RMS of an update before lr, > 0.
  TORCH_ARG(double, clip_threshold) = 1.0;
  /// beta2 = 1 - step^decay_rate; below 0.
  TORCH_ARG(double, decay_rate) = -0.8;
  /// Of a mean of updates, which costs a tensor like each parameter; unset: none.
  TORCH_ARG(beta1_t, beta1) = std::nullopt;
  /// Decoupled, >= 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// The rate is a share of the parameter's RMS.
  TORCH_ARG(bool, scale_parameter) = true;
  /// The rate is min(1e-2, 1 / sqrt(step)), or with warmup_init
  /// min(1e-6 step, 1 / sqrt(step)).
  TORCH_ARG(bool, relative_step) = true;
  TORCH_ARG(bool, warmup_init) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

/// Of a parameter with two dimensions or more: rows and columns of the last two.
struct AdafactorParamState final : torch::optim::OptimizerCloneableParamState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg_sq_row);
  TORCH_ARG(at::Tensor, exp_avg_sq_col);
  TORCH_ARG(at::Tensor, exp_avg_sq); // with fewer dimensions
  TORCH_ARG(at::Tensor, exp_avg); // with beta1
  TORCH_ARG(at::Tensor, master);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Shazeer and Stern, arXiv 1804.04235, as transformers' Adafactor does it.
/// Memory: rows + columns of each matrix. Cost: three passes over the gradient.
/// A group's own options replace the defaults as a whole.
class Adafactor : public detail::SteppedByEngine<torch::optim::Optimizer> {
 public:
  explicit Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     AdafactorOptions defaults = {}, FusedOptions fused = {});
  explicit Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults = {},
                     FusedOptions fused = {});
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

} // namespace hasten
