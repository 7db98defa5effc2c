// What a state holds of a Ddp: gradients that somebody still adds to.
#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/parallel/ddp.h"

namespace hasten {

namespace detail {

// The part of a group's flat buffer that belongs to a slot, in its view's shape.
at::Tensor slot_of_buffer(
    const at::Tensor& buffer, const FlatSlot& slot, const at::Tensor& view) {
  const at::Tensor part = buffer.narrow(0, slot.offset, slot.numel);
  return part.as_strided(view.sizes(), view.strides(), part.storage_offset());
}

} // namespace detail

void Ddp::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  values["begun"] = begun_;
  values["final"] = final_;
  values["carried"] = carried_;
  values["aside"] = !aside_.empty();
  const auto& slots = gradients_.layout().slots();
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const at::Tensor& gradient = slots[i].parameter.grad();
    if (gradient.defined() &&
        !(gradients_.known_zero() && gradients_.installed(index))) {
      tensors["grad." + slots[i].name] =
          gradient.is_sparse() ? gradient.to_dense() : gradient.detach();
    }
    if (!aside_.empty()) {
      tensors["aside." + slots[i].name] = detail::slot_of_buffer(
          aside_[static_cast<size_t>(slots[i].group)],
          slots[i],
          gradients_.view(index));
    }
  }
}

void Ddp::load_state(
    const NamedTensors& tensors, const nlohmann::json& values) {
  const auto& slots = gradients_.layout().slots();
  size_t known = 0;
  for (const FlatSlot& slot : slots) {
    for (const char* kind : {"grad.", "aside."}) {
      const auto saved = tensors.find(kind + slot.name);
      if (saved == tensors.end()) {
        continue;
      }
      ++known;
      if (saved->second.sizes() != slot.parameter.sizes() ||
          saved->second.scalar_type() != slot.parameter.scalar_type()) {
        throw InputError(
            "parallel::Ddp",
            saved->first + " has shape " + c10::str(saved->second.sizes()),
            "the parameter's " + c10::str(slot.parameter.sizes()));
      }
    }
  }
  if (known != tensors.size()) {
    throw InputError(
        "parallel::Ddp",
        "the state has gradients of parameters that are not trained here",
        "the same trainable parameters");
  }
  const bool begun = values.at("begun").get<bool>();
  const bool final = values.at("final").get<bool>();
  const bool carried = values.at("carried").get<bool>();
  const bool aside = values.at("aside").get<bool>();

  cancel();
  const at::NoGradGuard no_grad;
  if (aside) {
    for (size_t g = 0; g < gradients_.layout().groups().size(); ++g) {
      aside_.push_back(
          at::zeros_like(gradients_.buffer(static_cast<int64_t>(g))));
    }
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    slots[i].parameter.mutable_grad() = at::Tensor();
  }
  gradients_.install();
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (const auto saved = tensors.find("grad." + slots[i].name);
        saved != tensors.end()) {
      at::Tensor(gradients_.view(index)).copy_(saved->second);
      gradients_.mark_written();
    }
    if (const auto saved = tensors.find("aside." + slots[i].name);
        aside && saved != tensors.end()) {
      detail::slot_of_buffer(
          aside_[static_cast<size_t>(slots[i].group)],
          slots[i],
          gradients_.view(index))
          .copy_(saved->second);
    }
  }
  begun_ = begun;
  final_ = final;
  carried_ = carried;
}

} // namespace hasten
