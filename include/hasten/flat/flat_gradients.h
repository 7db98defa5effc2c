// Makes the gradients of a layout's parameters views of flat buffers. Autograd accumulates
// in-place, and reducing, clipping and optimizer steps work on a few large tensors. Memory: one
// copy of the gradients, allocated at the first use. Without install() or access to a buffer
// nothing is allocated.
// Every zero_grad is allowed, of the optimizer, the module or your own code: an undefined grad()
// counts as zero, whatever its place in the buffer holds, and install() restores the views.
// Threading: one thread; but several threads may call install_slot() for different slots.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "hasten/flat/flat_layout.h"

namespace hasten {

/// Allocates a zeroed 1-d buffer of `numel` elements, aligned to 64 bytes.
using FlatAllocator = std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)>;

class FlatGradients {
 public:
  /// `allocator` allocates the buffers, by default with at::zeros. Existing gradients stay where
  /// they are until install(). Sets grad_dtype of 16-bit parameters to kFloat permanently.
  explicit FlatGradients(FlatLayout layout, FlatAllocator allocator = {});

  const FlatLayout& layout() const { return layout_; }
  /// The groups' whole buffers. Their padding is zero. [group]
  const std::vector<at::Tensor>& buffers() const;
  /// The view for a slot's gradient, in its parameter's shape. [slot]
  const at::Tensor& view(int64_t slot) const;

  /// Makes every parameter's grad() its view again. An undefined grad() becomes a zeroed view;
  /// another tensor is copied into the view. Costs one comparison per parameter if all are in
  /// place. Local.
  void install(bool all = false);
  /// True if grad() of this slot is its view's memory.
  bool installed(int64_t slot) const;
  /// Like install() for one slot. Throws InputError that names the parameter if the gradient
  /// has another shape.
  void install_slot(int64_t slot) { install_slot(slot, nullptr); }
  /// The same for several slots. On a device other than the CPU one operator copies all of them.
  void install_slots(const std::vector<int64_t>& slots);

  /// From now on install_slots() leaves this slot alone, and so does install() unless it takes all
  /// slots: a sparse gradient stays as it is, and an undefined one undefined.
  void leave_sparse(int64_t slot) {
    sparse_.resize(layout_.slots().size());
    sparse_[static_cast<size_t>(slot)] = 1;
  }
  bool leaves(int64_t slot) const {
    return !sparse_.empty() && sparse_[static_cast<size_t>(slot)] != 0;
  }
  /// True: each place may be given once. False, the state at first: no place is given.
  void open_places(bool open) { given_.assign(open ? layout_.slots().size() : 0, 0); }
  /// The place of a parameter's gradient, for a backward that makes the gradient there: a view of its
  /// own, so that autograd takes it as grad(). Undefined if places are not open, if the parameter has
  /// no slot, or has a gradient, if the place was given before, on devices other than the CPU, or if
  /// dtype or strides differ.
  at::Tensor reserve_gradient_place(const at::Tensor& parameter);

  /// Makes every grad() undefined without touching the buffers. The next backward then brings its
  /// own tensors, which install_slot() copies in. That is one pass over memory instead of two
  /// (zeroing and adding).
  void reset();
  /// Calls reset() if nothing is lost: every grad() is undefined, or in place and known to be
  /// zero. Otherwise does nothing and returns false. Makes no pass over memory.
  bool release();

  /// Changes the order of the slots in the buffers and moves their gradients. Memory: a temporary
  /// copy of the buffers, unless they are known to be zero.
  void reorder(std::vector<int64_t> order);

  /// Zeroes all buffers.
  void zero_();
  /// True while the buffers are known to be zero, without a pass over them. Writes by torch's
  /// operators make it false.
  bool known_zero() const;
  /// Call this after writing into the buffers in another way (for example by a collective).
  void mark_written() { known_zero_ = false; }
  /// Checks the values: one pass over the buffers unless they are known to be zero. On a device other
  /// than the CPU it reads no values: false unless the buffers are known to be zero.
  bool all_zero();
  /// True if every grad() is undefined or zero, wherever it is: zero_grad was called. At most
  /// one pass over memory, which stops at the first gradient that is not zero. With `wait` false it
  /// does not wait for a device, whose values then count as not zero unless they are known.
  bool cleared(bool wait = true);

 private:
  /// Copies to make, as lists.
  struct Moves {
    std::vector<at::Tensor> to, from, zero;
  };
  void install_slot(int64_t slot, Moves* later);
  void allocate() const; // once
  at::Tensor make_view(int64_t slot) const;
  void note_zero() const;

  FlatLayout layout_;
  mutable FlatAllocator allocator_; // empty once it has been called
  mutable std::vector<at::Tensor> buffers_{}; // [group]
  mutable std::vector<at::Tensor> views_{}; // [slot]
  mutable std::vector<const void*> addresses_{}; // [slot] where each view begins
  std::vector<char> given_{}; // [slot] of open places; else empty
  std::vector<char> sparse_{}; // [slot] see leave_sparse(); empty: none
  // Views share the version counter of their buffer, so one comparison per buffer finds every
  // write by torch.
  mutable bool known_zero_ = true;
  mutable std::vector<uint32_t> zero_versions_{}; // [group] when it was zero
};

} // namespace hasten
