// Optimizers by the names that Hugging Face's --optim has.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

struct OptimizerSettings {
  /// Of groups without their own, >= 0.
  double learning_rate = 5e-5;
  double weight_decay = 0;
  /// AdamW's, Adam's and LAMB's.
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  /// "name=value,name=value"; they win over the fields above:
  ///   adam, adamw, lamb  beta1, beta2, eps; the first two: amsgrad
  ///   sgd                momentum (0), dampening (0), nesterov (false)
  ///   lion               beta1 (0.9), beta2 (0.99)
  ///   adafactor          eps1 (1e-30), eps2 (1e-3), clip_threshold (1), decay_rate
  ///                      (-0.8), beta1 (none), scale_parameter, relative_step,
  ///                      warmup_init (false): Hugging Face's Trainer's
  ///   all                bf16_moments (false), master_weights (true), seed (42)
  std::string args{};
};

/// adamw_torch, adamw_torch_fused, adamw (one and the same), adam, sgd, adafactor,
/// lion, lamb.
const std::vector<std::string>& optimizer_names();
/// Throws InputError for a name that is none (the nearest is offered) and for args
/// that this optimizer has not.
void check_optimizer(const std::string& name, const OptimizerSettings& settings);

/// `groups`: as decay_groups() makes them. Of a group's options, which are
/// AdamWOptions whatever the optimizer, count weight_decay and, unless it is torch's
/// 1e-3 for unset, lr; exactly, without the trap in adamw.h. Throws InputError as
/// check_optimizer() does, and for options out of range.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const OptimizerSettings& settings);

/// Bytes of that optimizer's tensors (moments, fp32 copies of 16-bit parameters) from
/// its first step on, for trained parameters of these shapes and this dtype. Exact: what
/// it allocates. Throws InputError as check_optimizer() does.
int64_t optimizer_state_bytes(const std::string& name, const OptimizerSettings& settings,
                              const std::vector<std::vector<int64_t>>& shapes,
                              at::ScalarType dtype = at::kFloat);

} // namespace hasten
