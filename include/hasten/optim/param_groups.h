// Decides which parameters get weight decay.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace hasten {

/// Makes two groups for AdamW: [0] with `weight_decay`, [1] with weight decay 0. A group may be
/// empty. Frozen parameters (requires_grad false) are in neither group. A tied parameter is
/// classified by its first name.
/// Hugging Face's rule: a parameter is decayed unless it belongs to a LayerNorm module, or its
/// dotted name, in lower case, contains "bias", "layernorm" or "rmsnorm", or has an element that is
/// "norm" or ends in "_norm". Embeddings are decayed. Also set `weight_decay` in the optimizer's
/// defaults: see the trap in adamw.h.
std::vector<torch::optim::OptimizerParamGroup> decay_groups(const torch::nn::Module& model,
                                                            double weight_decay);

/// Names of the parameters of group 0, in named_parameters() order.
std::vector<std::string> decayed_parameter_names(const torch::nn::Module& model);

} // namespace hasten
