// The state of torch's optimizers, and of those derived from them, as named
// tensors: moments by parameter name, so that it does not depend on the order of
// parameters or groups. Threading: none; local.
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

/// Name of each parameter, by its TensorImpl.
using ParameterNames = std::unordered_map<const void*, std::string>;

/// use(tensor) for each defined tensor of one parameter's state; false, and nothing,
/// where the state is of a type that save_optimizer_state does not know.
bool visit_state_tensors(torch::optim::OptimizerParamState& state,
                         const std::function<void(at::Tensor&)>& use);

/// hasten's own, and torch's Adam, AdamW, SGD, RMSprop, Adagrad: tensors "<moment>.<parameter>"; values:
/// "kind", "steps" by parameter, "rounding_seed" (of hasten's), "groups" (each option that a schedule or a user
/// may have changed, and the names of its parameters). A parameter without state
/// yet (before its first step) has none in the file.
/// Throws InputError for an optimizer of another type.
void save_optimizer_state(const torch::optim::Optimizer& optimizer, const ParameterNames& names,
                          NamedTensors& tensors, nlohmann::json& values);

/// Verifies that the state is this optimizer's: kind, groups, parameters, shapes.
/// Returns what restores it, which does not throw; moments lie where their
/// parameter lies. hasten's own take moments of any floating dtype and turn them into
/// theirs at the next step. Throws InputError naming what differs; changes nothing.
/// Memory of the restored state: two tensors like each parameter for Adam.
std::function<void()> prepare_optimizer_load(torch::optim::Optimizer& optimizer,
                                             const ParameterNames& names,
                                             const NamedTensors& tensors,
                                             const nlohmann::json& values);

} // namespace hasten
