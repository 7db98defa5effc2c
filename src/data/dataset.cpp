#include "hasten/data/dataset.h"

#include <ranges>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten {

const at::Tensor& Batch::operator[](const std::string& name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) {
    const auto names = std::views::keys(tensors);
    throw InputError("data::Batch", "no tensor name=" + name,
                     "one of: " + (tensors.empty() ? "(the batch has none)"
                                                   : joined({names.begin(), names.end()})));
  }
  return found->second;
}

Batch Batch::to(const at::Device& device) const {
  Batch moved{.tensors = {}, .indices = indices, .padded = padded};
  for (const auto& [name, tensor] : tensors) {
    moved.tensors.emplace(name, tensor.to(device));
  }
  return moved;
}

} // namespace hasten
