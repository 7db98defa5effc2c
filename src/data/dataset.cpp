#include "hasten/data/dataset.h"

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten {

const at::Tensor& Batch::operator[](const std::string& name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) {
    std::vector<std::string> names;
    for (const auto& [other, tensor] : tensors) {
      names.push_back(other);
    }
    throw InputError("data::Batch", "no tensor name=" + name,
                     "one of: " + (names.empty() ? "(the batch has none)" : joined(names)));
  }
  return found->second;
}

Batch Batch::to(const at::Device& device) const {
  Batch moved{.tensors = {}, .indices = indices};
  for (const auto& [name, tensor] : tensors) {
    moved.tensors.emplace(name, tensor.to(device));
  }
  return moved;
}

} // namespace hasten
