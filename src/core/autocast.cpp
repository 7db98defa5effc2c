#include "hasten/core/autocast.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <iterator>

#include "autocast_ops.h"
#include "hasten/base/error.h"

namespace hasten {

AutocastState AutocastState::now(const std::vector<at::Tensor>& tensors) {
  AutocastState state;
  state.devices_[1].type = at::DeviceType::CUDA;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu() && !tensor.is_meta()) {
      state.devices_[1].type = tensor.device().type();
      break;
    }
  }
  return state.again();
}

AutocastState AutocastState::again() const {
  AutocastState state = *this;
  for (OnDevice& on : state.devices_) {
    on.enabled = at::autocast::is_autocast_enabled(on.type);
    on.dtype = at::autocast::get_autocast_dtype(on.type);
  }
  state.cache_ = at::autocast::is_autocast_cache_enabled();
  state.fp32_ops_ = detail::fp32_ops();
  return state;
}

void AutocastState::restore() const {
  for (const OnDevice& on : devices_) {
    at::autocast::set_autocast_enabled(on.type, on.enabled);
    at::autocast::set_autocast_dtype(on.type, on.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_);
  detail::set_fp32_ops(fp32_ops_);
}

bool AutocastState::enabled() const {
  return std::any_of(std::begin(devices_), std::end(devices_),
                     [](const OnDevice& on) { return on.enabled; });
}

Autocast::Autocast(const AutocastOptions& options) : before_(AutocastState::now()) {
  const at::ScalarType dtype =
      options.dtype.value_or(options.device == at::kCPU ? at::kBFloat16 : at::kHalf);
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw InputError("core::Autocast", std::string("dtype=") + c10::toString(dtype),
                     "BFloat16 or Half", "leave Autocast out, or set enabled=false, for fp32");
  }
  if (options.device != at::kCPU && options.device != at::kCUDA) {
    throw InputError("core::Autocast", "device=" + c10::DeviceTypeName(options.device, true),
                     "cpu or cuda");
  }
  detail::register_fp32_ops();
  at::autocast::set_autocast_enabled(options.device, options.enabled);
  at::autocast::set_autocast_dtype(options.device, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache_enabled);
  if (options.device == at::kCPU) {
    detail::set_fp32_ops(options.fp32_ops);
  }
  at::autocast::increment_nesting();
}

Autocast::Autocast(const AutocastState& state) : before_(state.again()) {
  detail::register_fp32_ops();
  state.restore();
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  before_.restore();
}

std::optional<at::ScalarType> autocast_dtype(at::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) {
    return std::nullopt;
  }
  return at::autocast::get_autocast_dtype(device);
}

at::Tensor autocast_cast(const at::Tensor& x) {
  if (!x.defined()) {
    return x;
  }
  const at::DeviceType type = x.device().type();
  if ((type != at::kCPU && type != at::kCUDA) || !x.is_floating_point() ||
      x.scalar_type() == at::kDouble) {
    return x;
  }
  const auto dtype = autocast_dtype(type);
  return dtype ? x.to(*dtype) : x;
}

void drop_autocast_casts() { at::autocast::clear_cache(); }

} // namespace hasten
