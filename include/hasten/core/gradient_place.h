// Where gradients of parameters are kept. A function whose backward computes a parameter's gradient can
// write it there. That saves an allocation, its page faults and a copy.
// Threading: about the calling thread, in which a backward on the CPU runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace hasten::detail {

/// Memory for the whole gradient of a parameter that has none: contiguous, with the parameter's shape
/// and dtype and any values. Undefined if there is none. The caller overwrites all of it and returns
/// it as the gradient.
at::Tensor gradient_place(const at::Tensor& parameter);

/// While it lives, gradient_place() of this thread calls `find`, which gives a parameter's place once in
/// a backward. Scopes nest; the innermost one counts.
class GradientPlaceScope {
 public:
  using Find = std::function<at::Tensor(const at::Tensor& parameter)>;
  explicit GradientPlaceScope(Find find);
  GradientPlaceScope(const GradientPlaceScope&) = delete;
  GradientPlaceScope& operator=(const GradientPlaceScope&) = delete;
  ~GradientPlaceScope();

 private:
  Find find_;
  const Find* before_;
};

} // namespace hasten::detail
