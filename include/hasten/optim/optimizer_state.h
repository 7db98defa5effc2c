// The state of torch's optimizers and of classes derived from them, as named tensors. Moments are
// named by parameter, so the state does not depend on the order of parameters or groups. Threading:
// none; local.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <unordered_map>

#include "hasten/core/stateful.h"

namespace torch::optim {
class Optimizer;
class OptimizerParamState;
} // namespace torch::optim

namespace hasten {

/// Name of each parameter, with its TensorImpl as the key.
using ParameterNames = std::unordered_map<const void*, std::string>;

/// Calls use(tensor) for each defined tensor of one parameter's state. Returns false, without a
/// call, if save_optimizer_state does not know the state's type.
bool visit_state_tensors(torch::optim::OptimizerParamState& state,
                         const std::function<void(at::Tensor&)>& use);

/// Makes a state's moments of 8 bits fp32, so that they can be averaged or cut. The next step rounds them.
void dequantize_moments(torch::optim::OptimizerParamState& state);

/// Writes the state of hasten's optimizers, and of torch's Adam, AdamW, SGD, RMSprop and Adagrad.
/// Tensors: "<moment>.<parameter>". Values: "kind", "steps" by parameter, "rounding_seed" (hasten's
/// only), "groups" (parameter names, and each option that a schedule or a user may change). A
/// parameter without state (before its first step) has no entry.
/// Throws InputError for an optimizer of another type.
void save_optimizer_state(const torch::optim::Optimizer& optimizer, const ParameterNames& names,
                          NamedTensors& tensors, nlohmann::json& values);

/// Verifies that the state fits this optimizer: kind, groups, parameters, shapes. Changes nothing.
/// Returns a function that restores the state and does not throw. Moments are on their parameter's
/// device. hasten's optimizers accept moments of any floating dtype and convert them in the next
/// step. Throws InputError with the first difference.
/// Memory of the restored state: two tensors like each parameter for Adam.
std::function<void()> prepare_optimizer_load(torch::optim::Optimizer& optimizer,
                                             const ParameterNames& names,
                                             const NamedTensors& tensors,
                                             const nlohmann::json& values);

} // namespace hasten
