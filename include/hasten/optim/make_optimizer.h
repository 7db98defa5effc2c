// Makes optimizers by the names of Hugging Face's --optim.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hasten/optim/fused_optimizer.h"

namespace hasten {

struct OptimizerSettings {
  /// Used for groups without their own value, >= 0.
  double learning_rate = 5e-5;
  double weight_decay = 0;
  /// For AdamW and Adam.
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  /// "name=value,name=value". These override the fields above:
  ///   adam, adamw        beta1, beta2, eps, amsgrad (false)
  ///   adamw_8bit         adamw's, min_8bit_size (4096)
  ///   sgd                momentum (0), dampening (0), nesterov (false)
  ///   lion               beta1 (0.9), beta2 (0.99)
  ///   adafactor          eps1 (1e-30), eps2 (1e-3), clip_threshold (1), decay_rate (-0.8),
  ///                      beta1 (none), scale_parameter, relative_step, warmup_init (false):
  ///                      the defaults of Hugging Face's Trainer
  ///   all                bf16_moments (false), master_weights (true), seed (42)
  std::string args{};
  /// FusedOptions::keep_options.
  bool keep_options = false;
};

/// `name` is a spelling of OptimizerType. Throws InputError for an unknown name (the message has the
/// most similar one), and for args that this optimizer does not have.
void check_optimizer(const std::string& name, const OptimizerSettings& settings);

/// Makes an optimizer. `groups` are as decay_groups() makes them: their options are AdamWOptions
/// for every optimizer. Used are weight_decay, and lr unless it is torch's default 1e-3. The trap
/// in adamw.h does not apply. Throws InputError as check_optimizer() does, and for options out of
/// range.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const OptimizerSettings& settings);

/// Bytes that the optimizer allocates for its tensors (moments, fp32 copies of 16-bit parameters)
/// from its first step on, for trained parameters of these shapes and this dtype. Exact. Throws
/// InputError as check_optimizer() does.
int64_t optimizer_state_bytes(const std::string& name, const OptimizerSettings& settings,
                              const std::vector<std::vector<int64_t>>& shapes,
                              at::ScalarType dtype = at::kFloat);

} // namespace hasten
