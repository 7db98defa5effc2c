#include "window_watch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten::detail {

constexpr int64_t kSampled = 16; // elements of a tensor

template <typename Bits>
static uint64_t sample_bits(const void* data, int64_t numel) {
  const auto* bytes = static_cast<const char*>(data);
  const int64_t step = std::max<int64_t>(1, (numel - 1) / (kSampled - 1));
  uint64_t sample = 0;
  for (int64_t i = 0; i < numel; i += step) {
    Bits bits;
    std::memcpy(&bits, bytes + i * sizeof(Bits), sizeof(Bits));
    sample = mix(sample ^ bits, 0);
  }
  return sample;
}

WindowWatch::Mark WindowWatch::mark_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) {
    return {};
  }
  Mark mark{tensor.const_data_ptr(), static_cast<uint32_t>(tensor._version()), 0};
  if (tensor.is_cpu() && tensor.is_non_overlapping_and_dense()) {
    const auto sample = tensor.element_size() == 8   ? sample_bits<uint64_t>
                        : tensor.element_size() == 4 ? sample_bits<uint32_t>
                        : tensor.element_size() == 2 ? sample_bits<uint16_t>
                                                     : sample_bits<uint8_t>;
    mark.sample = sample(mark.data, tensor.numel());
  }
  return mark;
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
