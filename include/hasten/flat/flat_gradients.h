// The gradients of a layout's parameters as views of flat buffers: autograd
// accumulates in place, and whoever reduces, clips or steps works on few large
// tensors. Memory: one copy of the gradients, allocated once.
// Any zero_grad, by the optimizer, the module or by hand, is legal: install()
// puts the views back.
// Threading: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "hasten/flat/flat_layout.h"

namespace hasten {

/// Makes a zeroed 1-d buffer of `numel` elements, 64-byte aligned.
using FlatAllocator =
    std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)>;

class FlatGradients {
 public:
  /// `allocator`: who owns the memory, at::zeros by default. Installs the views;
  /// gradients that exist already are copied in.
  explicit FlatGradients(FlatLayout layout, FlatAllocator allocator = {});

  const FlatLayout& layout() const { return layout_; }
  /// The group's whole buffer; the padding in it is zero. [group]
  const at::Tensor& buffer(int64_t group) const { return buffers_.at(group); }
  /// The gradient of a slot, in its parameter's shape, in the buffer. [slot]
  const at::Tensor& view(int64_t slot) const { return views_.at(slot); }

  /// Makes every parameter's grad() its view again. Where it is undefined the
  /// view is zeroed first; where it is another tensor that one is copied in.
  /// Cheap where all are in place: one comparison a parameter. Local.
  void install();
  /// True where grad() of this slot is its view's memory.
  bool installed(int64_t slot) const;
  /// Copies a gradient that lies elsewhere into its view and installs that.
  void install_slot(int64_t slot);

  /// Zeroes all buffers.
  void zero_();
  /// False once the buffers may hold something: tells a pass over them from none.
  bool known_zero() const { return known_zero_; }
  /// To be said by whoever lets autograd or a collective write into the buffers.
  void mark_written() { known_zero_ = false; }
  /// Looks: one pass over the buffers unless they are known to be zero.
  bool all_zero();
  /// True where every grad() is undefined or zero: somebody called zero_grad.
  bool cleared();

 private:
  at::Tensor make_view(int64_t slot) const;

  FlatLayout layout_;
  std::vector<at::Tensor> buffers_{}; // [group]
  std::vector<at::Tensor> views_{}; // [slot]
  std::vector<const void*> addresses_{}; // [slot] where each view begins
  bool known_zero_ = true;
};

} // namespace hasten
