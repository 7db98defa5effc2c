// Clipping and looking at a complete window's gradients. An Accelerator is a
// Gradients: accelerator.clip_grad_norm_(model, 1.0), ….
// All of it is local: when a window is complete its gradients are equal on every
// rank, and so are the numbers returned and the errors thrown. Exception: inside a
// LocalSGD scope gradients, and so these, are the rank's own.
// While the window is incomplete nothing is done and 0 (no norms) returned.
// Tied parameters count once, frozen ones not; a parameter without a gradient in this
// window has none.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "hasten/accelerator/collect.h"
#include "hasten/accelerator/prepare.h"

namespace hasten {

/// What one norm is taken over.
enum class NormsOf {
  parameter,
  /// The parameters that one module itself has: weight and bias of a Linear.
  module,
  /// One of a numbered row of blocks, "encoder.layer.3" with all that is in it; what
  /// lies outside of those, by module.
  layer,
};

struct GradientNormsOptions {
  /// 1, 2, infinity, or any number above 0.
  double norm_type = 2;
  NormsOf of = NormsOf::layer;
};

struct GradientNorms {
  /// In order of registration; the norms beside them, NaN or infinite where a number
  /// of theirs is. Of the model's own parameters the module's name is "".
  std::vector<std::string> names{};
  std::vector<double> norms{};
  /// Over all parameters together: what clip_grad_norm_ returns.
  double total = 0;
  /// The first parameter, in order of registration, whose gradient holds a number that
  /// is not finite; empty: none does. And how many there are.
  std::string first_non_finite{};
  int64_t non_finite = 0;
};

class Gradients : public Collect {
 public:
  /// Scales the gradients down so that their global norm is at most max_norm, as
  /// torch.nn.utils.clip_grad_norm_ does. Returns the norm before. `norm_type` > 0:
  /// 1, 2, infinity. A norm that is not finite spoils every gradient, as torch's does.
  /// Cost: a pass over the gradients, one more where they are scaled.
  /// Throws TrainingError with `error_if_nonfinite` where the norm is not finite,
  /// naming the first such parameter; the gradients are as they were.
  template <detail::ModelHolder Model>
  double clip_grad_norm_(const Model& model, double max_norm, double norm_type = 2.0,
                         bool error_if_nonfinite = false) {
    return clip_norm(*detail::module_of(model), max_norm, norm_type, error_if_nonfinite);
  }
  /// The same over any of the prepared models' parameters.
  double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                         double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Limits every number to within [-clip_value, clip_value], as
  /// torch.nn.utils.clip_grad_value_ does. Returns the largest |number| before, NaN
  /// where there is one: NaN stays, infinity becomes clip_value, so look at what is
  /// returned, or give `error_if_nonfinite` as above. clip_value > 0. Cost: two passes
  /// over the gradients, and one before where AcceleratorOptions::scale_in_step has
  /// left them to be multiplied.
  template <detail::ModelHolder Model>
  double clip_grad_value_(const Model& model, double clip_value, bool error_if_nonfinite = false) {
    return clip_value_of(*detail::module_of(model), clip_value, error_if_nonfinite);
  }
  double clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value,
                          bool error_if_nonfinite = false);

  /// Norms by parameter, module or layer; call it before clipping. One pass over the
  /// gradients, which stay as they are.
  template <detail::ModelHolder Model>
  GradientNorms gradient_norms(const Model& model, const GradientNormsOptions& options = {}) const {
    return norms_of(*detail::module_of(model), options);
  }

 protected:
  using Collect::Collect;
  ~Gradients() = default;
  Gradients(Gradients&&) noexcept = default;

 private:
  double clip_norm(torch::nn::Module& model, double max_norm, double norm_type,
                   bool error_if_nonfinite);
  double clip_value_of(torch::nn::Module& model, double clip_value, bool error_if_nonfinite);
  GradientNorms norms_of(torch::nn::Module& model, const GradientNormsOptions& options) const;
};

} // namespace hasten
