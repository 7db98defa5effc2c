#include "hasten/core/named_tensors.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "hasten/core/random.h"

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

void clone_tensors(NamedTensors& tensors) {
  for (auto& [name, tensor] : tensors) {
    tensor = tensor.clone();
  }
}

nlohmann::json save_below(const Stateful& object, NamedTensors& tensors,
                          const std::string& prefix) {
  NamedTensors own;
  nlohmann::json values = nlohmann::json::object();
  object.save_state(own, values);
  put_below(tensors, prefix, own);
  return values;
}

uint64_t sample_of(const at::Tensor& tensor, int64_t count) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided ||
      !tensor.is_non_overlapping_and_dense()) {
    return 0;
  }
  const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
  const size_t size = tensor.element_size();
  const int64_t step = std::max<int64_t>(1, (tensor.numel() - 1) / (count - 1));
  uint64_t sample = 0;
  for (int64_t i = 0; i < tensor.numel(); i += step) {
    uint64_t bits = 0;
    std::memcpy(&bits, bytes + static_cast<size_t>(i) * size, std::min(size, sizeof(bits)));
    sample = mix(sample ^ bits, 0);
  }
  return sample;
}

} // namespace hasten::detail
