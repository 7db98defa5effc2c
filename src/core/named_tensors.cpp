#include "hasten/core/named_tensors.h"

#include <torch/nn/module.h>

namespace hasten::detail {

NamedTensors named_model_tensors(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters()) {
    tensors.emplace(item.key(), item.value().detach());
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) {
      tensors.emplace(item.key(), item.value().detach());
    }
  }
  return tensors;
}

NamedTensors tensors_below(const NamedTensors& tensors, const std::string& prefix) {
  NamedTensors below;
  for (auto it = tensors.lower_bound(prefix); it != tensors.end() && it->first.starts_with(prefix);
       ++it) {
    below.emplace(it->first.substr(prefix.size()), it->second);
  }
  return below;
}

void put_below(NamedTensors& tensors, const std::string& prefix, const NamedTensors& more) {
  for (const auto& [name, tensor] : more) {
    tensors.emplace(prefix + name, tensor);
  }
}

} // namespace hasten::detail
