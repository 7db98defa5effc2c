// Tensors by name, and samples of their values. Threading: free functions.
#pragma once

#include <cstdint>

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

/// Gives every tensor its own memory.
void clone_tensors(NamedTensors& tensors);

/// Saves `object`, its tensors below `prefix`. Returns its JSON values.
nlohmann::json save_below(const Stateful& object, NamedTensors& tensors, const std::string& prefix);

/// A hash of about `count` elements, evenly spaced. It shows writes that change no version counter.
/// 0 for a tensor that has holes or is not on the CPU.
uint64_t sample_of(const at::Tensor& tensor, int64_t count);

} // namespace hasten::detail
