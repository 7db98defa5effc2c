// Several functions on one parameter's post-accumulate hook. Torch has a single
// slot for it per tensor, and setting it replaces what was there; whoever in
// hasten wants to know that a gradient is final comes here.
// Threading: add and drop hooks while no backward runs; hooks run on the thread
// that accumulates (the one that called backward, for CPU tensors).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace hasten {

/// Called after the gradient of `parameter` was accumulated: once per backward,
/// also when the parameter was used twice; never by autograd::grad. What it
/// throws comes out of backward(), the gradient being accumulated by then.
using GradHookFunction = std::function<void(const at::Tensor& parameter)>;

/// Keeps the function registered while it lives.
class [[nodiscard]] GradHook {
 public:
  GradHook() = default;
  GradHook(GradHook&& other) noexcept;
  GradHook& operator=(GradHook&& other) noexcept;
  ~GradHook();

  /// Takes torch's slot back where somebody else has set it since; what they set
  /// keeps running, before ours.
  void ensure_installed();

  struct List; // the functions of one parameter

 private:
  friend GradHook add_grad_hook(const at::Tensor&, GradHookFunction);
  at::Tensor parameter_{};
  std::shared_ptr<List> list_{};
  uint64_t id_ = 0;
};

/// `parameter` is a leaf that requires grad. Functions run in the order they were
/// added. A hook that was set in torch's own slot before is kept and runs first.
GradHook add_grad_hook(const at::Tensor& parameter, GradHookFunction function);

} // namespace hasten
