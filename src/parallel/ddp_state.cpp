// A Ddp's part of a state: gradients of an unfinished sum.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/named_tensors.h"
#include "hasten/parallel/ddp.h"

namespace hasten {

namespace detail {

// The part of a group's flat buffer that belongs to a slot, in its view's shape.
at::Tensor slot_of_buffer(const at::Tensor& buffer, const FlatSlot& slot, const at::Tensor& view) {
  const at::Tensor part = buffer.narrow(0, slot.offset, slot.numel);
  return part.as_strided(view.sizes(), view.strides(), part.storage_offset());
}

// Throws unless every gradient in a state is one of the layout's. `others`: the number of further
// tensors in the state.
void check_saved_gradients(const NamedTensors& tensors, const FlatLayout& layout, size_t others) {
  const auto& slots = layout.slots();
  size_t known = 0;
  for (const FlatSlot& slot : slots) {
    for (const char* kind : {"grad.", "aside."}) {
      const auto saved = tensors.find(kind + slot.name);
      if (saved == tensors.end()) {
        continue;
      }
      ++known;
      if (saved->second.sizes() != slot.parameter.sizes() ||
          saved->second.scalar_type() != flat_gradient_dtype(slot.dtype)) {
        throw InputError("parallel::Ddp",
                         saved->first + " has shape " + c10::str(saved->second.sizes()),
                         "the parameter's " + c10::str(slot.parameter.sizes()));
      }
    }
  }
  if (known + others != tensors.size()) {
    throw InputError("parallel::Ddp",
                     "the state has gradients of parameters that are not trainable here",
                     "the same trainable parameters");
  }
}

} // namespace detail

void Ddp::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  values["begun"] = begun_;
  values["final"] = final_;
  values["pending_factor"] = pending_factor_;
  values["aside"] = !earlier_gradients_.empty();
  const auto& slots = gradients_.layout().slots();
  const auto names = [&slots](const std::vector<char>& marks) {
    auto list = nlohmann::json::array();
    for (size_t slot = 0; slot < marks.size(); ++slot) {
      if (marks[slot]) {
        list.push_back(slots[slot].name);
      }
    }
    return list;
  };
  values["used"] = names(used_);
  values["defined"] = names(defined_);
  values["order_in_use"] = learned_in_use_;
  values["bucket_order"] =
      mapped(learned_, [&](int64_t slot) { return slots[static_cast<size_t>(slot)].name; });
  values["comm_hook"] = hook_ ? hook_->description() : "none";
  if (hook_) {
    values["comm_hook_state"] = detail::save_below(*hook_, tensors, "comm_hook.");
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const at::Tensor& gradient = slots[i].parameter.grad();
    if (gradient.defined() && !(gradients_.known_zero() && gradients_.installed(index))) {
      tensors["grad." + slots[i].name] =
          gradient.is_sparse() ? gradient.to_dense() : gradient.detach();
    }
    if (!earlier_gradients_.empty()) {
      tensors["aside." + slots[i].name] =
          detail::slot_of_buffer(earlier_gradients_[static_cast<size_t>(slots[i].group)], slots[i],
                                 gradients_.view(index));
    }
  }
}

// Empty if no order was learned.
static std::vector<int64_t> saved_order(const FlatLayout& layout, const nlohmann::json& names) {
  std::map<std::string, int64_t> by_name;
  const auto& slots = layout.slots();
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    by_name[slots[slot].name] = static_cast<int64_t>(slot);
  }
  std::vector<int64_t> order;
  for (const auto& name : names) {
    const auto it = by_name.find(name.get<std::string>());
    if (it == by_name.end()) {
      throw InputError("parallel::Ddp",
                       "the state has a parameter \"" + name.get<std::string>() + "\"",
                       "the trainable parameters of this model");
    }
    order.push_back(it->second);
    by_name.erase(it);
  }
  if (!order.empty() && !by_name.empty()) {
    throw InputError("parallel::Ddp",
                     "the state has no parameter \"" + by_name.begin()->first + "\"",
                     "every trainable parameter of this model");
  }
  return order;
}

void Ddp::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  const NamedTensors of_hook = detail::tensors_below(tensors, "comm_hook.");
  const std::string hook = hook_ ? hook_->description() : "none";
  if (values.at("comm_hook") != hook) {
    throw InputError("parallel::Ddp",
                     "the state was saved with the communication hook " +
                         values.at("comm_hook").get<std::string>() + ", but the model has " + hook,
                     "the same hook, registered before loading");
  }
  std::vector<int64_t> order = saved_order(gradients_.layout(), values.at("bucket_order"));
  detail::check_saved_gradients(tensors, gradients_.layout(), of_hook.size());
  const auto& slots = gradients_.layout().slots();
  const bool begun = values.at("begun").get<bool>();
  const bool final = values.at("final").get<bool>();
  const bool has_earlier = values.at("aside").get<bool>();

  const auto marks = [&slots](const nlohmann::json& names) {
    std::vector<char> marked(slots.size(), 0);
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      marked[slot] = std::find(names.begin(), names.end(), slots[slot].name) != names.end();
    }
    return marked;
  };
  if (hook_) {
    hook_->load_state(of_hook, values.at("comm_hook_state"));
  }
  cancel();
  learned_ = std::move(order);
  learned_in_use_ = false;
  if (values.at("order_in_use").get<bool>()) {
    use_learned_order();
  }
  used_ = marks(values.at("used"));
  defined_ = marks(values.at("defined"));
  const at::NoGradGuard no_grad;
  if (has_earlier) {
    earlier_gradients_ = mapped(gradients_.buffers(),
                                [](const at::Tensor& buffer) { return at::zeros_like(buffer); });
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (const auto saved = tensors.find("grad." + slots[i].name); saved != tensors.end()) {
      gradients_.install_slot(index);
      at::Tensor(gradients_.view(index)).copy_(saved->second);
    }
    if (const auto saved = tensors.find("aside." + slots[i].name);
        has_earlier && saved != tensors.end()) {
      detail::slot_of_buffer(earlier_gradients_[static_cast<size_t>(slots[i].group)], slots[i],
                             gradients_.view(index))
          .copy_(saved->second);
    }
  }
  begun_ = begun;
  final_ = final;
  pending_factor_ = values.at("pending_factor").get<double>();
}

} // namespace hasten
