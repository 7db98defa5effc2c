#include "hasten/flat/flat_gradients.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>

namespace hasten {

FlatGradients::FlatGradients(FlatLayout layout, FlatAllocator allocator)
    : layout_(std::move(layout)) {
  if (!allocator) {
    allocator = [](int64_t numel, const at::TensorOptions& options) {
      return at::zeros({numel}, options);
    };
  }
  at::NoGradGuard no_grad;
  for (const FlatGroup& group : layout_.groups()) {
    buffers_.push_back(allocator(
        group.numel, at::TensorOptions(group.dtype).device(group.device)));
  }
  const auto count = static_cast<int64_t>(layout_.slots().size());
  for (int64_t slot = 0; slot < count; ++slot) {
    views_.push_back(make_view(slot));
    addresses_.push_back(views_.back().const_data_ptr());
  }
  install();
}

at::Tensor FlatGradients::make_view(int64_t slot) const {
  const FlatSlot& s = layout_.slots()[static_cast<size_t>(slot)];
  const at::Tensor& buffer = buffers_[static_cast<size_t>(s.group)];
  // The parameter's own strides, where they cover its elements without holes, so
  // that kernels over parameter and gradient walk both in one pass. detach():
  // a view as such would make Optimizer::zero_grad(false) throw.
  const at::Tensor& p = s.parameter;
  const auto part = buffer.narrow(0, s.offset, s.numel);
  return p.is_non_overlapping_and_dense()
             ? part.as_strided(p.sizes(), p.strides(), part.storage_offset())
                   .detach()
             : part.view(p.sizes()).detach();
}

bool FlatGradients::installed(int64_t slot) const {
  const auto i = static_cast<size_t>(slot);
  const at::Tensor& grad = layout_.slots()[i].parameter.grad();
  return grad.defined() && !grad.is_sparse() &&
         grad.const_data_ptr() == addresses_[i] &&
         grad.scalar_type() == views_[i].scalar_type() &&
         grad.sizes() == views_[i].sizes() &&
         grad.strides() == views_[i].strides();
}

void FlatGradients::install_slot(int64_t slot) {
  if (installed(slot)) {
    return;
  }
  const auto i = static_cast<size_t>(slot);
  at::NoGradGuard no_grad;
  if (views_[i].const_data_ptr() != addresses_[i]) {
    views_[i] = make_view(slot); // somebody gave our tensor other data
  }
  at::Tensor& grad = layout_.slots()[i].parameter.mutable_grad();
  if (grad.defined()) {
    views_[i].copy_(grad.is_sparse() ? grad.to_dense() : grad);
    known_zero_ = false;
  } else if (!known_zero_) {
    views_[i].zero_();
  }
  grad = views_[i];
}

void FlatGradients::install() {
  const auto& slots = layout_.slots();
  bool any_defined = false;
  for (const FlatSlot& slot : slots) {
    any_defined = any_defined || slot.parameter.grad().defined();
  }
  if (!any_defined && !known_zero_) {
    zero_(); // one pass a buffer instead of one a parameter
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    install_slot(static_cast<int64_t>(i));
  }
}

void FlatGradients::zero_() {
  at::NoGradGuard no_grad;
  for (at::Tensor& buffer : buffers_) {
    buffer.zero_();
  }
  known_zero_ = true;
}

bool FlatGradients::all_zero() {
  if (known_zero_) {
    return true;
  }
  for (const at::Tensor& buffer : buffers_) {
    // The largest magnitude; NaN if there is one, which is not zero either.
    if (buffer.numel() > 0 &&
        at::linalg_vector_norm(buffer, std::numeric_limits<double>::infinity())
                .item<double>() != 0) {
      return false;
    }
  }
  known_zero_ = true;
  return true;
}

bool FlatGradients::cleared() {
  bool undefined = true;
  bool in_place = true;
  for (size_t i = 0; i < views_.size(); ++i) {
    undefined = undefined && !layout_.slots()[i].parameter.grad().defined();
    in_place = in_place && installed(static_cast<int64_t>(i));
  }
  return undefined || (in_place && all_zero());
}

} // namespace hasten
