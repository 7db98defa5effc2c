#include "hasten/flat/flat_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

// Copies small gradients, of which there are thousands, without the dispatcher.
bool flat_copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  constexpr size_t kSmall = 1 << 14; // bytes; above it copy_ costs no more
  if (from.is_sparse() || from.nbytes() > kSmall || !from.device().is_cpu() ||
      from.scalar_type() != to.scalar_type() || from.is_conj() || from.is_neg() ||
      !from.is_contiguous() || !to.is_contiguous() || !to.device().is_cpu()) {
    return false;
  }
  std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  return true;
}

} // namespace detail

FlatGradients::FlatGradients(FlatLayout layout, FlatAllocator allocator)
    : layout_(std::move(layout)), allocator_(std::move(allocator)) {
  if (!allocator_) {
    allocator_ = [](int64_t numel, const at::TensorOptions& options) {
      return at::zeros({numel}, options);
    };
  }
  for (const FlatSlot& slot : layout_.slots()) {
    const at::Tensor& p = slot.parameter;
    const at::ScalarType dtype = flat_gradient_dtype(p.scalar_type());
    if (p.grad_dtype() == dtype) {
      continue;
    }
    // From now on autograd's gradients have this dtype.
    const at::Tensor grad = p.grad();
    p.mutable_grad() = at::Tensor();
    p.set_grad_dtype(dtype);
    if (grad.defined()) {
      p.mutable_grad() = grad.to(dtype);
    }
  }
}

void FlatGradients::allocate() const {
  if (!allocator_) {
    return;
  }
  at::NoGradGuard no_grad;
  for (const FlatGroup& group : layout_.groups()) {
    buffers_.push_back(
        allocator_(group.numel, at::TensorOptions(group.dtype).device(group.device)));
  }
  for (size_t slot = 0; slot < layout_.slots().size(); ++slot) {
    views_.push_back(make_view(static_cast<int64_t>(slot)));
    addresses_.push_back(views_.back().const_data_ptr());
  }
  note_zero();
  allocator_ = nullptr;
}

const std::vector<at::Tensor>& FlatGradients::buffers() const {
  allocate();
  return buffers_;
}

const at::Tensor& FlatGradients::view(int64_t slot) const {
  allocate();
  return views_.at(static_cast<size_t>(slot));
}

at::Tensor FlatGradients::make_view(int64_t slot) const {
  const FlatSlot& s = layout_.slots()[static_cast<size_t>(slot)];
  const at::Tensor& buffer = buffers_[static_cast<size_t>(s.group)];
  // Uses the parameter's strides, so that kernels over parameter and gradient walk both in one
  // pass. Without detach() a view would make Optimizer::zero_grad(false) throw.
  return buffer.as_strided(s.sizes, s.strides, buffer.storage_offset() + s.offset).detach();
}

bool FlatGradients::installed(int64_t slot) const {
  const auto i = static_cast<size_t>(slot);
  const at::Tensor& grad = layout_.slots()[i].parameter.grad();
  return !addresses_.empty() && grad.defined() && !grad.is_sparse() &&
         grad.const_data_ptr() == addresses_[i] &&
         (grad.is_same(views_[i]) || (grad.scalar_type() == views_[i].scalar_type() &&
                                      grad.strides() == views_[i].strides())) &&
         grad.sizes() == views_[i].sizes();
}

void FlatGradients::install_slots(const std::vector<int64_t>& slots) {
  Moves moves;
  for (const int64_t slot : slots) {
    const at::Tensor& grad = layout_.slots()[static_cast<size_t>(slot)].parameter.grad();
    if (!leaves(slot) || (grad.defined() && !grad.is_sparse())) {
      install_slot(slot, &moves);
    }
  }
  const at::NoGradGuard no_grad;
  if (!moves.to.empty()) {
    at::_foreach_copy_(moves.to, moves.from);
  }
  if (!moves.zero.empty()) {
    at::_foreach_zero_(moves.zero);
  }
}

void FlatGradients::install_slot(int64_t slot, Moves* later) {
  if (installed(slot)) {
    return;
  }
  allocate();
  const auto i = static_cast<size_t>(slot);
  at::NoGradGuard no_grad;
  if (views_[i].const_data_ptr() != addresses_[i]) {
    views_[i] = make_view(slot); // other code has replaced the view's data
  }
  at::Tensor& grad = layout_.slots()[i].parameter.mutable_grad();
  const bool listed = later != nullptr && !views_[i].is_cpu();
  if (grad.defined()) {
    if (grad.sizes() != views_[i].sizes()) {
      throw InputError("flat::FlatGradients",
                       c10::str("the gradient of parameter \"", layout_.slots()[i].name,
                                "\" has shape ", grad.sizes()),
                       c10::str("its parameter's shape, ", views_[i].sizes()));
    }
    known_zero_ = false;
    if (listed && !grad.is_sparse()) {
      later->to.push_back(views_[i]);
      later->from.push_back(grad);
    } else if (!detail::flat_copy_bytes(views_[i], grad)) {
      views_[i].copy_(grad.is_sparse() ? grad.to_dense() : grad);
    }
  } else if (!known_zero()) {
    if (listed) {
      later->zero.push_back(views_[i]);
    } else {
      views_[i].zero_();
    }
  }
  grad = views_[i];
}

void FlatGradients::install(bool everything) {
  const auto& slots = layout_.slots();
  if (!known_zero() && std::none_of(slots.begin(), slots.end(), [](const FlatSlot& slot) {
        return slot.parameter.grad().defined();
      })) {
    zero_(); // one pass per buffer instead of one per parameter
  }
  std::vector<int64_t> all(slots.size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<char> left = everything ? std::exchange(sparse_, {}) : std::vector<char>();
  install_slots(all);
  sparse_ = everything ? left : sparse_;
}

at::Tensor FlatGradients::reserve_gradient_place(const at::Tensor& parameter) {
  const int64_t slot = layout_.find(parameter);
  const auto i = static_cast<size_t>(slot);
  if (slot < 0 || i >= given_.size() || given_[i] || parameter.grad().defined()) {
    return {};
  }
  allocate();
  if (!views_[i].is_cpu() || views_[i].scalar_type() != parameter.scalar_type() ||
      !parameter.is_contiguous() || views_[i].const_data_ptr() != addresses_[i]) {
    return {};
  }
  given_[i] = 1;
  known_zero_ = false;
  const at::NoGradGuard no_grad;
  return make_view(slot);
}

void FlatGradients::reset() {
  for (const FlatSlot& slot : layout_.slots()) {
    slot.parameter.mutable_grad().reset();
  }
}

bool FlatGradients::release() {
  const bool zero = known_zero();
  for (size_t i = 0; i < layout_.slots().size(); ++i) {
    if (layout_.slots()[i].parameter.grad().defined() &&
        !(zero && installed(static_cast<int64_t>(i)))) {
      return false;
    }
  }
  reset();
  return true;
}

void FlatGradients::reorder(std::vector<int64_t> order) {
  if (allocator_) { // the buffers are not allocated yet
    layout_.reorder(std::move(order));
    return;
  }
  at::NoGradGuard no_grad;
  std::vector<char> in_place; // [slot]
  for (int64_t i = 0; i < std::ssize(views_); ++i) {
    in_place.push_back(installed(i));
  }
  if (!known_zero() && std::find(in_place.begin(), in_place.end(), 1) == in_place.end()) {
    zero_(); // no gradient is in the buffers
  }
  const bool zero = known_zero();
  std::vector<at::Tensor> values; // [slot]
  for (int64_t i = 0; !zero && i < std::ssize(views_); ++i) {
    values.push_back(make_view(i).clone());
  }
  layout_.reorder(std::move(order));
  if (!zero) {
    zero_(); // the padding moves, too
  }
  for (size_t i = 0; i < views_.size(); ++i) {
    views_[i] = make_view(static_cast<int64_t>(i));
    addresses_[i] = views_[i].const_data_ptr();
    if (!zero) {
      views_[i].copy_(values[i]);
    }
    if (in_place[i]) {
      layout_.slots()[i].parameter.mutable_grad() = views_[i];
    }
  }
}

void FlatGradients::zero_() {
  at::NoGradGuard no_grad;
  for (at::Tensor& buffer : buffers_) {
    buffer.zero_();
  }
  note_zero();
}

void FlatGradients::note_zero() const {
  known_zero_ = true;
  zero_versions_.clear();
  for (const at::Tensor& buffer : buffers_) {
    zero_versions_.push_back(buffer._version());
  }
}

bool FlatGradients::known_zero() const {
  for (size_t g = 0; known_zero_ && g < buffers_.size(); ++g) {
    if (buffers_[g]._version() != zero_versions_[g]) {
      return false;
    }
  }
  return known_zero_;
}

bool FlatGradients::all_zero() {
  if (known_zero()) {
    return true;
  }
  for (const at::Tensor& buffer : buffers_) {
    if (!buffer.is_cpu()) {
      return false;
    }
    // The largest magnitude. NaN if an element is NaN, which is not zero either.
    if (buffer.numel() > 0 &&
        at::linalg_vector_norm(buffer, std::numeric_limits<double>::infinity()).item<double>() !=
            0) {
      return false;
    }
  }
  note_zero();
  return true;
}

bool FlatGradients::cleared(bool wait) {
  bool all_in_place = true;
  for (size_t i = 0; i < layout_.slots().size(); ++i) {
    all_in_place = all_in_place && installed(static_cast<int64_t>(i));
  }
  if (all_in_place && (known_zero() || !wait || buffers_.empty() || buffers_[0].is_cpu())) {
    return all_zero();
  }
  for (const FlatSlot& slot : layout_.slots()) {
    const at::Tensor& grad = slot.parameter.grad();
    if (grad.defined() && !grad.is_cpu() && !wait) {
      return false;
    }
    if (grad.defined() &&
        (grad.is_sparse() ? grad._values() : grad).count_nonzero().item<int64_t>() != 0) {
      return false;
    }
  }
  return true;
}

} // namespace hasten
