// Which parameters weight decay applies to.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace hasten {

/// The groups for AdamW: [0] decayed with `weight_decay`, [1] the rest with 0.
/// Frozen parameters (requires_grad false) are in neither; a tied parameter is
/// where its first name puts it. Both groups are always there, perhaps empty.
/// Hugging Face's rule: decayed unless the parameter belongs to a LayerNorm
/// module, or its dotted name, in lower case, contains "bias", "layernorm" or
/// "rmsnorm", or has an element that is "norm" or ends in "_norm".
/// Embeddings are decayed. Give `weight_decay` in the optimizer's defaults,
/// too: see the trap in adamw.h.
std::vector<torch::optim::OptimizerParamGroup> decay_groups(const torch::nn::Module& model,
                                                            double weight_decay);

/// Names of the parameters of group 0, in named_parameters() order.
std::vector<std::string> decayed_parameter_names(const torch::nn::Module& model);

} // namespace hasten
