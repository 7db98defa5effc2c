// Several functions on one parameter's post-accumulate hook. Torch has one such hook per tensor,
// and setting it replaces the previous one. Parts of hasten that must know when a gradient is
// accumulated use this header.
// Threading: add and drop hooks while no backward runs. Hooks run on the thread that accumulates
// (for CPU tensors the one that called backward).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace hasten {

/// Called after the gradient of `parameter` was accumulated: once per backward, even if the
/// parameter was used twice, and never by autograd::grad. Its exceptions leave backward(); the
/// gradient is accumulated by then.
using GradHookFunction = std::function<void(const at::Tensor& parameter)>;

namespace detail {
using GradHookList = std::vector<std::weak_ptr<const GradHookFunction>>;
} // namespace detail

/// Keeps a function registered while it lives.
class [[nodiscard]] GradHook {
 public:
  /// `parameter` is a leaf that requires grad. Functions run in the order in which they were added.
  /// A hook that was set directly in torch before still runs, before them.
  /// Throws InputError for another tensor.
  GradHook(const at::Tensor& parameter, GradHookFunction function);

  /// Installs this hook again if other code has replaced torch's hook since. The other code's
  /// hook still runs, before this one.
  void ensure_installed();

 private:
  at::Tensor parameter_;
  std::shared_ptr<detail::GradHookList> list_; // of all hooks of the parameter
  std::shared_ptr<GradHookFunction> function_;
};

} // namespace hasten
