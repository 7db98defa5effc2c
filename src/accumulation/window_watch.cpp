#include "window_watch.h"

#include <ATen/ATen.h>

#include "hasten/base/error.h"
#include "hasten/core/named_tensors.h"

namespace hasten::detail {

constexpr int64_t kWatched = 16; // elements of a tensor

WindowWatch::Mark WindowWatch::mark_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) {
    return {};
  }
  return {tensor.const_data_ptr(), static_cast<uint32_t>(tensor._version()),
          sample_of(tensor, kWatched)};
}

void WindowWatch::remember(const std::vector<std::shared_ptr<DataParallel>>& models) {
  seen_.clear();
  for (const auto& model : models) {
    if (model->sharded()) {
      continue;
    }
    for (const FlatSlot& slot : model->gradients().layout().slots()) {
      seen_.push_back({&slot, mark_of(slot.parameter), mark_of(slot.parameter.grad())});
    }
  }
}

void WindowWatch::check(bool parameters) const {
  for (const Seen& seen : seen_) {
    const Mark gradient = mark_of(seen.slot->parameter.grad());
    const bool kept = gradient == seen.gradient;
    if (kept && !(parameters && mark_of(seen.slot->parameter) != seen.parameter)) {
      continue;
    }
    throw InputError("accumulation::accumulate",
                     (kept ? "parameter \"" : "the gradient of parameter \"") + seen.slot->name +
                         (kept || gradient.data != nullptr ? "\" was changed" : "\" was dropped") +
                         " in the middle of a window",
                     "no step, clip or zero_grad() before the window's last batch",
                     "use step() and zero_grad() of the optimizer that prepare() returned, "
                     "and accelerator.clip_grad_norm_(): they wait for the window's end; or "
                     "set check_accumulation=false");
  }
}

} // namespace hasten::detail
