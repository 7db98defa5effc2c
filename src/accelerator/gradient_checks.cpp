#include "gradient_checks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>
#include <algorithm>
#include <cmath>
#include <utility>
#include "hasten/base/log.h"
#include "hasten/optim/gradient_norm.h"
#include "mixed_precision.h"
#include "model_set.h"
#include "run_context.h"
#include "window_set.h"

namespace hasten::detail {

// Values of a device are read only if steps depend on them.
void GradientChecks::note(Facts& facts, const DeviceScalar& value) {
  if (!value.pending()) {
    facts.non_finite = facts.non_finite || !std::isfinite(value);
  } else if (run_.options().skip_non_finite_steps) {
    facts.unread.push_back(value);
  }
}

bool GradientChecks::non_finite(size_t model) {
  Facts& facts = facts_of(model);
  for (const DeviceScalar& value : std::exchange(facts.unread, {})) {
    facts.non_finite = facts.non_finite || !std::isfinite(value);
  }
  return facts.non_finite;
}

void GradientChecks::completed(const GradientWindow& window) {
  const DeviceScalar& bad = window.report().non_finite;
  for (size_t i = 0; i < models_.size(); ++i) {
    if (windows_.of(i) == &window) {
      Facts& facts = facts_of(i);
      facts.bad_losses = bad;
      facts.looked = false;
      facts.norm.reset();
      note(facts, bad.then([](double count) { return count > 0 ? NAN : 0; }));
    }
  }
}

void GradientChecks::begins(size_t model) {
  const Facts& facts = facts_of(model);
  if ((facts.non_finite || !facts.unread.empty()) && !windows_.in_window(model) &&
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
  if (facts.norm && std::isfinite(*facts.norm)) {
    facts.looked = true;
    facts.overflow = false;
  }
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

void GradientChecks::note_norm(const std::vector<SlotList>& lists, const DeviceScalar& norm) {
  for (const SlotList& list : lists) {
    Facts& facts = facts_of(list.model);
    if (list.all && !facts.looked && !facts.norm && (norm.pending() || std::isfinite(norm))) {
      facts.norm = norm;
    }
    note(facts, norm);
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
        found = overflowed(i) || found;
        bad_loss = bad_loss || facts_of(i).bad_losses > 0;
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
    return overflowed(list.model) || facts_of(list.model).bad_losses > 0;
  });
}

bool GradientChecks::non_finite(const std::vector<SlotList>& lists) {
  return std::ranges::any_of(lists,
                             [this](const SlotList& list) { return non_finite(list.model); });
}

} // namespace hasten::detail
