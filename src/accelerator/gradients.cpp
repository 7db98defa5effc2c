#include "hasten/accelerator/gradients.h"

#include "accelerator_core.h"
#include "hasten/base/error.h"

namespace hasten {

namespace detail {

void require_clip(bool good, const char* where, const std::string& what) {
  if (!good) {
    throw InputError(where, what, "above 0");
  }
}

GradientClip by_norm(double max_norm, double norm_type, bool error) {
  require_clip(max_norm > 0 && norm_type > 0, "accelerator::clip_grad_norm_",
               "max_norm=" + std::to_string(max_norm) + ", norm_type=" + std::to_string(norm_type));
  GradientClip how;
  how.max_norm = max_norm;
  how.norm_type = norm_type;
  how.error_if_nonfinite = error;
  return how;
}

GradientClip by_value(double clip_value, bool error) {
  require_clip(clip_value > 0, "accelerator::clip_grad_value_",
               "clip_value=" + std::to_string(clip_value));
  GradientClip how;
  how.clip_value = clip_value;
  how.error_if_nonfinite = error;
  return how;
}

} // namespace detail

double Gradients::clip_norm(torch::nn::Module& model, double max_norm, double norm_type,
                            bool error_if_nonfinite) {
  const auto how = detail::by_norm(max_norm, norm_type, error_if_nonfinite);
  const size_t index = core_->models.index(&model, "accelerator::clip_grad_norm_");
  return core_->optimizers.clip({{.model = index, .all = true, .slots = {}}}, how);
}

double Gradients::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                  double norm_type, bool error_if_nonfinite) {
  const auto how = detail::by_norm(max_norm, norm_type, error_if_nonfinite);
  return core_->optimizers.clip(core_->models.slots_of(parameters), how);
}

double Gradients::clip_value_of(torch::nn::Module& model, double clip_value,
                                bool error_if_nonfinite) {
  const auto how = detail::by_value(clip_value, error_if_nonfinite);
  const size_t index = core_->models.index(&model, "accelerator::clip_grad_value_");
  return core_->optimizers.clip({{.model = index, .all = true, .slots = {}}}, how);
}

double Gradients::clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value,
                                   bool error_if_nonfinite) {
  const auto how = detail::by_value(clip_value, error_if_nonfinite);
  return core_->optimizers.clip(core_->models.slots_of(parameters), how);
}

GradientNorms Gradients::norms_of(torch::nn::Module& model,
                                  const GradientNormsOptions& options) const {
  return core_->optimizers.gradient_norms(
      core_->models.index(&model, "accelerator::gradient_norms"), options);
}

} // namespace hasten
