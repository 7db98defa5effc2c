#include "gradient_checks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "hasten/base/log.h"
#include "hasten/optim/gradient_norm.h"

namespace hasten::detail {

void GradientChecks::completed(const GradientWindow& window) {
  const bool bad_loss = window.report().non_finite > 0;
  for (size_t i = 0; i < models_.size(); ++i) {
    if (windows_.of(i) == &window) {
      Facts& facts = facts_of(i);
      facts.bad_loss = bad_loss;
      facts.looked = false;
      facts.non_finite = facts.non_finite || bad_loss;
    }
  }
}

void GradientChecks::begins(size_t model) {
  if (facts_of(model).non_finite && !windows_.in_window(model) &&
      models_[model].parallel->gradients().cleared()) {
    zeroed(model);
  }
}

// Note [Who finds an overflow]
// Gradients are checked when a window is complete. They are reduced by a sum, so an infinity of one
// rank is one on all ranks, and every rank decides alike without a message. Hooks that compress
// keep non-finite values. In a LocalSGD scope each rank decides for itself, and its attempted steps
// count all the same. For unsharded models the norm that clipping computes is enough; otherwise a
// pass only reads the gradients.
bool GradientChecks::overflowed(size_t model) {
  Facts& facts = facts_of(model);
  if (!facts.looked) {
    const DataParallel& parallel = *models_[model].parallel;
    std::vector<at::Tensor> gradients;
    for (const auto& slot : parallel.gradients().layout().slots()) {
      const at::Tensor& gradient = slot.parameter.grad();
      if (gradient.defined()) {
        gradients.push_back(gradient.is_sparse() ? gradient._values() : gradient);
      }
    }
    std::vector<double> largest{gradient_norm(gradients, INFINITY)};
    parallel.reduce_norms(largest, INFINITY);
    facts.overflow = !std::isfinite(largest[0]);
    facts.looked = true;
  }
  return facts.overflow;
}

void GradientChecks::note_norm(const std::vector<SlotList>& lists, double norm) {
  for (const SlotList& list : lists) {
    Facts& facts = facts_of(list.model);
    if (list.all && std::isfinite(norm) && !facts.looked) {
      facts.looked = true;
      facts.overflow = false;
    }
    facts.non_finite = facts.non_finite || !std::isfinite(norm);
  }
}

bool GradientChecks::leaves_out_step(const std::vector<SlotList>& lists, uint64_t complete) {
  if (!precision_.scales()) {
    return false;
  }
  if (complete > scaled_serial_) {
    scaled_serial_ = complete;
    bool bad_loss = false;
    bool found = false;
    for (size_t i = 0; i < models_.size(); ++i) {
      if (windows_.completed(i) == complete) {
        bad_loss = bad_loss || facts_of(i).bad_loss;
        found = overflowed(i) || found;
      }
    }
    if (bad_loss) {
      log_warning(
          "the loss is NaN or infinite before it is scaled. Another loss scale cannot "
          "help: the step is skipped, the loss scale stays at " +
          std::to_string(precision_.loss_scale().value()) +
          ". Activations above 65504 are infinite in fp16: bf16 has fp32's range");
    } else {
      precision_.update(found);
    }
  }
  return std::ranges::any_of(lists, [&](const SlotList& list) {
    return overflowed(list.model) || facts_of(list.model).bad_loss;
  });
}

bool GradientChecks::non_finite(const std::vector<SlotList>& lists) const {
  return std::ranges::any_of(lists,
                             [this](const SlotList& list) { return non_finite(list.model); });
}

} // namespace hasten::detail
