// Tensors by name. Threading: free functions.
#pragma once

#include "hasten/core/stateful.h"

namespace torch::nn {
class Module;
}

namespace hasten::detail {

/// Parameters and buffers by name. A tied tensor occurs under each of its names.
NamedTensors named_model_tensors(const torch::nn::Module& module);

/// The tensors whose names begin with `prefix`; their names without the prefix.
NamedTensors tensors_below(const NamedTensors& tensors, const std::string& prefix);

/// Adds `more` to `tensors`, with `prefix` before each name.
void put_below(NamedTensors& tensors, const std::string& prefix, const NamedTensors& more);

} // namespace hasten::detail
