// LAMB: Adam with a step as long as each tensor asks for. See fused_optimizer.h for what it shares
// with the other optimizers.
#pragma once

#include <torch/optim/serialize.h>

#include <tuple>
#include <vector>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

struct LambOptions : torch::optim::OptimizerCloneableOptions<LambOptions> {
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
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

struct LambParamState final : torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, master);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// You and others, arXiv 1904.00962, algorithm 2, with |x| for phi:
///   r = m' / (sqrt(v') + eps) + weight_decay p, m' and v' without their bias,
///   p <- p - lr |p| / |r| r, for each tensor; the ratio is 1 where one is 0.
/// Memory: two tensors like each parameter. Cost: two passes, 1.6 times AdamW's
/// traffic. A group's own options replace the defaults as a whole.
class Lamb : public detail::SteppedByEngine<torch::optim::Optimizer> {
 public:
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                LambOptions defaults = {}, FusedOptions fused = {});
  explicit Lamb(std::vector<at::Tensor> parameters, LambOptions defaults = {},
                FusedOptions fused = {});
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

} // namespace hasten
