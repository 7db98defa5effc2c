#include "hasten/flat/grad_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "hasten/base/error.h"

namespace hasten {

struct GradHook::List {
  std::vector<std::pair<uint64_t, GradHookFunction>> functions;
  uint64_t last_id = 0;
};

namespace detail {

// The hook in torch's slot. It shares the list. If other code replaces it, the next call of
// add_grad_hook() or ensure_installed() installs a new one around the other hook.
struct GradHookSlot : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    if (foreign) {
      (*foreign)(parameter);
    }
    for (const auto& entry : list->functions) {
      entry.second(parameter);
    }
  }
  std::shared_ptr<GradHook::List> list;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> foreign;
};

GradHookSlot* find_grad_hook_slot(const at::Tensor& parameter) {
  return dynamic_cast<GradHookSlot*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

// Installs a GradHookSlot around the hook that torch has now.
void install_grad_hook_slot(const at::Tensor& parameter, std::shared_ptr<GradHook::List> list) {
  auto slot = std::make_unique<GradHookSlot>();
  slot->list = std::move(list);
  slot->foreign = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(slot));
}

} // namespace detail

GradHook add_grad_hook(const at::Tensor& parameter, GradHookFunction function) {
  if (!parameter.defined() || !parameter.is_leaf() || !parameter.requires_grad()) {
    throw InputError("flat::add_grad_hook", "the parameter is not a leaf that requires grad",
                     "a trainable parameter, because on other tensors the hook would never run");
  }
  GradHook hook;
  if (auto* slot = detail::find_grad_hook_slot(parameter)) {
    hook.list_ = slot->list;
  } else {
    hook.list_ = std::make_shared<GradHook::List>();
    detail::install_grad_hook_slot(parameter, hook.list_);
  }
  hook.parameter_ = parameter;
  hook.id_ = ++hook.list_->last_id;
  hook.list_->functions.emplace_back(hook.id_, std::move(function));
  return hook;
}

void GradHook::ensure_installed() {
  if (!list_) {
    return;
  }
  // Another list may be installed, which was created after this hook had been replaced.
  auto* slot = detail::find_grad_hook_slot(parameter_);
  while (slot != nullptr && slot->list != list_) {
    slot = dynamic_cast<detail::GradHookSlot*>(slot->foreign.get());
  }
  if (slot == nullptr) {
    detail::install_grad_hook_slot(parameter_, list_);
  }
}

GradHook::GradHook(GradHook&& other) noexcept
    : parameter_(std::move(other.parameter_)), list_(std::move(other.list_)), id_(other.id_) {}

GradHook& GradHook::operator=(GradHook&& other) noexcept {
  if (this != &other) {
    std::swap(parameter_, other.parameter_);
    std::swap(list_, other.list_);
    std::swap(id_, other.id_);
  }
  return *this;
}

GradHook::~GradHook() {
  if (list_) {
    auto& functions = list_->functions;
    functions.erase(std::remove_if(functions.begin(), functions.end(),
                                   [this](const auto& entry) { return entry.first == id_; }),
                    functions.end());
  }
}

} // namespace hasten
