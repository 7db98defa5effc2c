// The gradients of a layout's parameters as views of flat buffers: autograd
// accumulates in place, and whoever reduces, clips or steps works on few large
// tensors. Memory: one copy of the gradients, allocated once, when it is first
// needed: whoever neither installs nor looks at a buffer pays nothing.
// Any zero_grad, by the optimizer, the module or by hand, is legal: an undefined
// grad() counts as zero whatever lies in its place in the buffer, and install()
// puts the views back.
// Threading: one thread; install_slot() of different slots on several.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "hasten/flat/flat_layout.h"

namespace hasten {

/// Makes a zeroed 1-d buffer of `numel` elements, 64-byte aligned.
using FlatAllocator = std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)>;

class FlatGradients {
 public:
  /// `allocator`: who owns the memory, at::zeros by default. Gradients that exist
  /// already stay where they are until install(). A 16-bit parameter's grad_dtype
  /// becomes kFloat, for good.
  explicit FlatGradients(FlatLayout layout, FlatAllocator allocator = {});

  const FlatLayout& layout() const { return layout_; }
  /// The group's whole buffer; the padding in it is zero. [group]
  const at::Tensor& buffer(int64_t group) const;
  /// The gradient of a slot, in its parameter's shape, in the buffer. [slot]
  const at::Tensor& view(int64_t slot) const;

  /// Makes every parameter's grad() its view again. Where it is undefined the
  /// view is zeroed first; where it is another tensor that one is copied in.
  /// Cheap where all are in place: one comparison a parameter. Local.
  void install();
  /// True where grad() of this slot is its view's memory.
  bool installed(int64_t slot) const;
  /// The same for one. Throws InputError naming the parameter where the gradient
  /// has another shape.
  void install_slot(int64_t slot);

  /// Makes every grad() undefined, without a look at the buffers: the next
  /// backward hands over tensors of its own, which install_slot() copies in. One
  /// pass instead of one that zeroes and one that adds.
  void reset();
  /// reset(), where it loses nothing: every grad() is undefined, or in place and
  /// known to be zero. Else does nothing and returns false. No pass.
  bool release();

  /// Gives the slots other places in the buffers and moves what lies there.
  /// Memory: a temporary copy of the buffers, unless they are known to be zero.
  void reorder(std::vector<int64_t> order);

  /// Zeroes all buffers.
  void zero_();
  /// False once the buffers may hold something: tells a pass over them from none.
  /// What torch's operations write, it notices.
  bool known_zero() const;
  /// To be said by whoever writes into the buffers by other means (a collective).
  void mark_written() { known_zero_ = false; }
  /// Looks: one pass over the buffers unless they are known to be zero.
  bool all_zero();
  /// True where every grad(), wherever it lies, is undefined or zero: somebody
  /// called zero_grad. One pass at most, to the first that is not.
  bool cleared();

 private:
  void allocate() const; // once
  at::Tensor make_view(int64_t slot) const;
  void note_zero();

  FlatLayout layout_;
  mutable FlatAllocator allocator_; // until it has been called
  mutable std::vector<at::Tensor> buffers_{}; // [group]
  mutable std::vector<at::Tensor> views_{}; // [slot]
  mutable std::vector<const void*> addresses_{}; // [slot] where each view begins
  // Views share their buffer's version counter, so one comparison a buffer finds
  // every write by torch.
  mutable bool known_zero_ = true;
  mutable std::vector<uint32_t> zero_versions_{}; // [group] when it was zero
};

} // namespace hasten
