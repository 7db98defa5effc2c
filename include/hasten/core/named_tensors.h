// Tensors by name. Threading: free functions.
#pragma once

#include "hasten/core/stateful.h"

namespace torch::nn {
class Module;
}

namespace hasten::detail {

/// Parameters and buffers by name, tied ones under each of their names.
NamedTensors named_model_tensors(const torch::nn::Module& module);

/// The tensors whose names begin with `prefix`, without it.
NamedTensors tensors_below(const NamedTensors& tensors, const std::string& prefix);

} // namespace hasten::detail
