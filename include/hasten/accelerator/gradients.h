// Clipping and norms of a complete window's gradients. Accelerator derives from Gradients:
// accelerator.clip_grad_norm_(model, 1.0), …. All functions are local. When a window is complete,
// its gradients are equal on every rank, so returned values and exceptions are, too. Exception:
// inside a LocalSGD scope gradients, and so these values, are the rank's own.
// While the window is incomplete, the functions do nothing and return 0 (no norms). Tied parameters
// count once. Frozen parameters, and parameters without a gradient in this window, do not count.
// Clipping does not wait for a device: only reading the norm does, or `error_if_nonfinite`.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "hasten/accelerator/collect.h"
#include "hasten/accelerator/prepare.h"
#include "hasten/core/device_scalar.h"

namespace hasten {

/// The parameters that one norm covers.
enum class NormsOf {
  parameter,
  /// A module's own parameters, such as weight and bias of a Linear.
  module,
  /// A numbered block with everything in it, such as "encoder.layer.3"; outside of such blocks a
  /// module.
  layer,
};

struct GradientNormsOptions {
  /// 1, 2, infinity, or any other value > 0.
  double norm_type = 2;
  NormsOf of = NormsOf::layer;
};

struct GradientNorms {
  /// In order of registration; norms[i] belongs to names[i]. It is NaN or infinite if an element
  /// is. The module name of the model's own parameters is "".
  std::vector<std::string> names{};
  std::vector<double> norms{};
  /// Norm over all parameters, as clip_grad_norm_ returns it.
  double total = 0;
  /// The first parameter, in order of registration, whose gradient has an element that is not
  /// finite; empty if there is none. And the number of such parameters.
  std::string first_non_finite{};
  int64_t non_finite = 0;
};

class Gradients : public Collect {
 public:
  /// Scales the gradients down so that their total norm is at most max_norm, like
  /// torch.nn.utils.clip_grad_norm_. Returns the norm before clipping. `norm_type` > 0: 1, 2,
  /// infinity. A norm that is not finite makes every gradient non-finite, as in torch. Cost: one
  /// pass over the gradients, and another if they are scaled.
  /// Throws TrainingError if `error_if_nonfinite` is set and the norm is not finite, naming the
  /// first such parameter; the gradients are then unchanged.
  DeviceScalar clip_grad_norm_(const detail::ModelRef& model, double max_norm,
                               double norm_type = 2.0, bool error_if_nonfinite = false);
  /// The same over some parameters of prepared models.
  DeviceScalar clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                               double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Clamps every element to [-clip_value, clip_value], like torch.nn.utils.clip_grad_value_.
  /// Returns the largest |element| before, or NaN if there is one. NaN stays and infinity becomes
  /// clip_value, so check the returned value or set `error_if_nonfinite` as above. clip_value > 0.
  /// Cost: two passes over the gradients, and another one before if
  /// AcceleratorOptions::scale_in_step has deferred their multiplication.
  DeviceScalar clip_grad_value_(const detail::ModelRef& model, double clip_value,
                                bool error_if_nonfinite = false);
  DeviceScalar clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value,
                                bool error_if_nonfinite = false);

  /// Returns norms by parameter, module or layer; call it before clipping. One pass over the
  /// gradients, which stay unchanged.
  GradientNorms gradient_norms(const detail::ModelRef& model,
                               const GradientNormsOptions& options = {}) const;

 protected:
  using Collect::Collect;
  ~Gradients() = default;
  Gradients(Gradients&&) noexcept = default;
};

} // namespace hasten
