#include "hasten/accelerator/gradients.h"
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <algorithm>
#include <cctype>
#include <cmath>
#include "accelerator_core.h"
#include "gradient_checks.h"
#include "hasten/base/error.h"
#include "hasten/optim/gradient_norm.h"
#include "mixed_precision.h"
#include "model_set.h"
#include "open_batch.h"
#include "optimizer_set.h"
#include "run_context.h"
#include "window_set.h"

namespace hasten {

namespace detail {

// Multiplies by min(1, max_norm / norm) without waiting for the device.
static void clip_on_device(const std::vector<at::Tensor>& gradients, const at::Tensor& norm,
                           double max_norm, double pending) {
  if (gradients.empty()) {
    return;
  }
  const at::Tensor whole = pending == 1 ? norm : norm * pending;
  const at::Tensor factor = (whole + 1e-6).reciprocal_().mul_(max_norm).clamp_max_(1);
  at::_foreach_mul_(gradients, (pending == 1 ? factor : factor * pending)
                                   .to(at::promote_types(gradients[0].scalar_type(), at::kFloat))
                                   .squeeze(0));
}

DeviceScalar OptimizerSet::clip(const std::vector<SlotList>& lists, const GradientClip& how) {
  const bool by_value = how.clip_value > 0;
  const char* where = by_value ? "accelerator::clip_grad_value_" : "accelerator::clip_grad_norm_";
  batch_.complete_open_window(lists);
  if (windows_.acts(lists) == WindowSet::Acts::in_window) {
    return 0;
  }
  windows_.check_reduced(lists, where);
  for (const SlotList& list : lists) {
    if (by_value && precision_.scales()) { // clipped infinities cannot be seen any more
      checks_.overflowed(list.model);
    }
  }
  const at::NoGradGuard no_grad;
  double pending = 1;
  if (by_value) {
    for (const SlotList& list : lists) {
      models_[list.model].parallel->apply_pending_factor();
    }
  } else {
    pending = common_factor(lists);
  }
  const Gathered found = gradients_of(lists);
  const DeviceScalar norm =
      norm_of(lists, found, by_value ? INFINITY : how.norm_type).then([pending](double own) {
        return own * pending;
      });
  if (how.error_if_nonfinite && !std::isfinite(norm)) {
    refuse_non_finite(lists, where, norm);
  }
  if (by_value) {
    if (norm.pending() || !(norm <= how.clip_value)) {
      clip_by_value_(found.pieces, how.clip_value);
    }
  } else if (norm.pending()) {
    clip_on_device(found.pieces, norm.tensor(), how.max_norm, pending);
    for (const SlotList& list : lists) {
      models_[list.model].parallel->set_pending_factor(1);
    }
  } else if (const double factor = how.max_norm / (norm + 1e-6); // as torch.nn.utils does
             !(factor >= 1) && pending != 1) {
    for (const SlotList& list : lists) {
      models_[list.model].parallel->set_pending_factor(pending * factor);
    }
  } else if (!(factor >= 1)) {
    for (const at::Tensor& piece : found.pieces) {
      piece.mul_(factor);
    }
  }
  checks_.note_norm(lists, norm);
  note_done([this, lists, how] { clip(lists, how); });
  return norm;
}

OptimizerSet::Gathered OptimizerSet::gradients_of(const std::vector<SlotList>& lists) {
  Gathered found;
  for (const SlotList& list : lists) {
    FlatGradients& flat = models_[list.model].parallel->gradients();
    const size_t first = found.gradients.size();
    const auto count = static_cast<int64_t>(flat.layout().slots().size());
    bool in_place = list.all;
    for (int64_t i = 0; i < (list.all ? count : std::ssize(list.slots)); ++i) {
      const int64_t slot = list.all ? i : list.slots[static_cast<size_t>(i)];
      const auto& parameter = flat.layout().slots()[static_cast<size_t>(slot)].parameter;
      in_place = in_place && flat.installed(slot);
      if (!parameter.grad().defined()) {
        continue; // it is not stepped
      }
      // It may be the user's own tensor.
      if (parameter.grad().sizes() != parameter.sizes()) {
        flat.install_slot(slot);
      }
      found.gradients.push_back(parameter.grad());
    }
    if (!in_place) {
      found.pieces.insert(found.pieces.end(),
                          found.gradients.begin() + static_cast<std::ptrdiff_t>(first),
                          found.gradients.end());
      continue;
    }
    found.pieces.insert(found.pieces.end(), flat.buffers().begin(), flat.buffers().end());
  }
  return found;
}

DeviceScalar OptimizerSet::norm_of(const std::vector<SlotList>& lists, const Gathered& all,
                                   double norm_type) {
  const bool sharded = std::ranges::any_of(
      lists, [this](const SlotList& list) { return models_[list.model].parallel->sharded(); });
  if (!sharded) {
    return gradient_norm(all.gradients, norm_type);
  }
  std::vector<double> norms;
  std::vector<at::Tensor> on_device; // also of a rank whose shards are empty
  for (const SlotList& list : lists) {
    const DeviceScalar norm = gradient_norm(gradients_of({list}).gradients, norm_type);
    const DataParallel& parallel = *models_[list.model].parallel;
    if (!run_.device().is_cpu()) {
      const auto options = at::TensorOptions(at::kDouble).device(run_.device());
      on_device.push_back(parallel.reduce_norm(
          norm.pending() ? norm.tensor() : at::full({1}, norm.item(), options), norm_type));
      continue;
    }
    std::vector<double> own{norm};
    parallel.reduce_norms(own, norm_type);
    norms.push_back(own[0]);
  }
  if (!on_device.empty()) {
    return DeviceScalar(on_device.size() == 1
                            ? on_device[0]
                            : at::linalg_vector_norm(at::cat(on_device), norm_type));
  }
  return norm_of_norms(norms, norm_type);
}

GradientNorms OptimizerSet::norms_in_order(const SlotList& list, double p) const {
  const DataParallel& spread = *models_[list.model].parallel;
  const auto& slots = spread.gradients().layout().slots();
  std::vector<at::Tensor> gradients;
  GradientNorms found;
  for (int64_t i = std::ssize(slots) - 1; i >= 0; --i) { // registered in reverse order
    const FlatSlot& slot = slots[static_cast<size_t>(i)];
    if (slot.parameter.grad().defined() &&
        (list.all || std::ranges::find(list.slots, i) != list.slots.end())) {
      gradients.push_back(slot.parameter.grad());
      found.names.push_back(slot.name);
    }
  }
  found.norms = tensor_norms(gradients, p); // waits for a device
  spread.reduce_norms(found.norms, p);
  return found;
}

// Norms go through abs(), because some devices' NaN has a sign, which would be printed.
void OptimizerSet::refuse_non_finite(const std::vector<SlotList>& lists, const char* where,
                                     double norm) const {
  run_.communicator()->check("gradient norm"); // the norm is undefined after the loss of a rank
  std::string first;
  int64_t count = 0, of = 0;
  for (const SlotList& list : lists) {
    const GradientNorms found = norms_in_order(list, INFINITY);
    for (size_t i = 0; i < found.norms.size(); ++i, ++of) {
      if (!std::isfinite(found.norms[i]) && ++count == 1) {
        first = found.names[i] + " (largest |g|=" + std::to_string(std::abs(found.norms[i])) + ")";
      }
    }
  }
  throw TrainingError(where,
                      "the gradient is not finite: norm=" + std::to_string(std::abs(norm)) +
                          (count == 0 ? ", although every gradient is finite: the sum is too large"
                                      : ", first in " + first + ", in " + std::to_string(count) +
                                            " of " + std::to_string(of) + " parameters"),
                      "a finite gradient",
                      "lower the learning rate, or check divisions and logarithms in that "
                      "parameter's operations");
}

// "encoder.layer.3" of "encoder.layer.3.output.dense.weight".
std::string norm_group(const std::string& parameter, NormsOf of) {
  if (of == NormsOf::parameter) {
    return parameter;
  }
  for (size_t at = 0; of == NormsOf::layer && at < parameter.size();) {
    const size_t end = parameter.find('.', at);
    if (end == std::string::npos) {
      break;
    }
    if (std::all_of(parameter.begin() + static_cast<std::ptrdiff_t>(at),
                    parameter.begin() + static_cast<std::ptrdiff_t>(end),
                    [](unsigned char c) { return std::isdigit(c) != 0; })) {
      return parameter.substr(0, end);
    }
    at = end + 1;
  }
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? std::string() : parameter.substr(0, dot);
}

GradientNorms OptimizerSet::gradient_norms(size_t model, const GradientNormsOptions& options) {
  const std::vector<SlotList> lists{{.model = model, .all = true, .slots = {}}};
  GradientNorms result;
  if (windows_.acts(lists) == WindowSet::Acts::in_window) {
    return result;
  }
  windows_.check_reduced(lists, "accelerator::gradient_norms");
  const double p = options.norm_type;
  auto [names, own, total, first, count] = norms_in_order(lists[0], p);
  for (size_t i = 0; i < own.size(); ++i) {
    own[i] *= models_[model].parallel->pending_factor();
    if (!std::isfinite(own[i]) && ++result.non_finite == 1) {
      result.first_non_finite = names[i];
    }
  }
  std::vector<std::vector<double>> parts; // [name]
  for (size_t i = 0; i < own.size(); ++i) {
    const std::string name = norm_group(names[i], options.of);
    const auto known = std::ranges::find(result.names, name);
    if (known == result.names.end()) {
      result.names.push_back(name);
      parts.push_back({own[i]});
    } else {
      parts[static_cast<size_t>(known - result.names.begin())].push_back(own[i]);
    }
  }
  for (const auto& of_name : parts) {
    result.norms.push_back(norm_of_norms(of_name, p));
  }
  result.total = norm_of_norms(own, p);
  return result;
}

void require_clip(bool good, const char* where, const std::string& what) {
  if (!good) {
    throw InputError(where, what, "above 0");
  }
}

GradientClip by_norm(double max_norm, double norm_type, bool error) {
  require_clip(max_norm > 0 && norm_type > 0, "accelerator::clip_grad_norm_",
               "max_norm=" + std::to_string(max_norm) + ", norm_type=" + std::to_string(norm_type));
  return {.max_norm = max_norm, .norm_type = norm_type, .error_if_nonfinite = error};
}

GradientClip by_value(double clip_value, bool error) {
  require_clip(clip_value > 0, "accelerator::clip_grad_value_",
               "clip_value=" + std::to_string(clip_value));
  return {.clip_value = clip_value, .error_if_nonfinite = error};
}

} // namespace detail

DeviceScalar Gradients::clip_grad_norm_(const detail::ModelRef& model, double max_norm,
                                        double norm_type, bool error_if_nonfinite) {
  const auto how = detail::by_norm(max_norm, norm_type, error_if_nonfinite);
  const size_t index = core_->models.index(model.get(), "accelerator::clip_grad_norm_");
  return core_->optimizers.clip({{.model = index, .all = true}}, how);
}

DeviceScalar Gradients::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                        double norm_type, bool error_if_nonfinite) {
  const auto how = detail::by_norm(max_norm, norm_type, error_if_nonfinite);
  return core_->optimizers.clip(core_->models.slots_of(parameters), how);
}

DeviceScalar Gradients::clip_grad_value_(const detail::ModelRef& model, double clip_value,
                                         bool error_if_nonfinite) {
  const auto how = detail::by_value(clip_value, error_if_nonfinite);
  const size_t index = core_->models.index(model.get(), "accelerator::clip_grad_value_");
  return core_->optimizers.clip({{.model = index, .all = true}}, how);
}

DeviceScalar Gradients::clip_grad_value_(const std::vector<at::Tensor>& parameters,
                                         double clip_value, bool error_if_nonfinite) {
  const auto how = detail::by_value(clip_value, error_if_nonfinite);
  return core_->optimizers.clip(core_->models.slots_of(parameters), how);
}

GradientNorms Gradients::gradient_norms(const detail::ModelRef& model,
                                        const GradientNormsOptions& options) const {
  return core_->optimizers.gradient_norms(
      core_->models.index(model.get(), "accelerator::gradient_norms"), options);
}

} // namespace hasten
