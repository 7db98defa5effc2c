#include "hasten/flat/grad_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

// The hook in torch's slot. It shares the list. If other code replaces it, the next call of
// GradHook() or ensure_installed() installs a new one around the other hook.
struct GradHookSlot : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    if (foreign) {
      (*foreign)(parameter);
    }
    for (const auto& function : *list) {
      if (const auto alive = function.lock()) {
        (*alive)(parameter);
      }
    }
  }
  std::shared_ptr<GradHookList> list;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> foreign;
};

GradHookSlot* find_grad_hook_slot(const at::Tensor& parameter) {
  return dynamic_cast<GradHookSlot*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

// Installs a GradHookSlot around the hook that torch has now.
void install_grad_hook_slot(const at::Tensor& parameter, std::shared_ptr<GradHookList> list) {
  auto slot = std::make_unique<GradHookSlot>();
  slot->list = std::move(list);
  slot->foreign = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(slot));
}

} // namespace detail

GradHook::GradHook(const at::Tensor& parameter, GradHookFunction function)
    : parameter_(parameter), function_(std::make_shared<GradHookFunction>(std::move(function))) {
  if (!parameter.defined() || !parameter.is_leaf() || !parameter.requires_grad()) {
    throw InputError("flat::GradHook", "the parameter is not a leaf that requires grad",
                     "a trainable parameter, because on other tensors the hook would never run");
  }
  if (auto* slot = detail::find_grad_hook_slot(parameter)) {
    list_ = slot->list;
  } else {
    list_ = std::make_shared<detail::GradHookList>();
    detail::install_grad_hook_slot(parameter, list_);
  }
  std::erase_if(*list_, [](const auto& other) { return other.expired(); });
  list_->push_back(function_);
}

void GradHook::ensure_installed() {
  // Another list may be installed, which was created after this hook had been replaced.
  auto* slot = detail::find_grad_hook_slot(parameter_);
  while (slot != nullptr && slot->list != list_) {
    slot = dynamic_cast<detail::GradHookSlot*>(slot->foreign.get());
  }
  if (slot == nullptr) {
    detail::install_grad_hook_slot(parameter_, list_);
  }
}

} // namespace hasten
