// The places of parameters' gradients in a few flat buffers, one per dtype and device. Gradients
// of 16-bit parameters are fp32, so sums over batches and ranks are not rounded to 16 bits. All
// ranks that build the same model have the same layout. The index of a slot never changes; its
// place changes when the layout is reordered, which is done once.
// Threading: one thread.
// Design: docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hasten {

struct FlatSlot {
  /// The name under which the parameter is registered first.
  std::string name{};
  at::Tensor parameter{};
  /// Sizes of the parameter when the layout was made.
  std::vector<int64_t> sizes{};
  /// Strides of the gradient in the buffer: the parameter's when the layout was made, or
  /// row-major if those leave gaps or overlap.
  std::vector<int64_t> strides{};
  at::ScalarType dtype = at::kFloat;
  /// Index into groups().
  int64_t group = 0;
  /// Index of the first element in the group's buffer; a multiple of 64 bytes.
  int64_t offset = 0;
  /// Number of elements, without the padding after them.
  int64_t numel = 0;
};

/// Parameters whose gradients have one dtype, on one device, share a buffer.
struct FlatGroup {
  /// Dtype of the gradients: flat_gradient_dtype of the parameters' dtype.
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  /// Number of elements of the buffer, including padding.
  int64_t numel = 0;
};

/// kFloat for kHalf and kBFloat16, otherwise the same dtype.
at::ScalarType flat_gradient_dtype(at::ScalarType parameter_dtype);

namespace detail {
/// Number of elements that a slot of `numel` elements takes, rounded up to 64 bytes.
int64_t flat_padded(int64_t numel, at::ScalarType dtype);
} // namespace detail

class FlatLayout {
 public:
  using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

  FlatLayout() = default;
  /// `parameters` are in the order of registration. Slots are laid out in reverse order, which is
  /// about the order in which backward completes gradients. A tensor that is listed twice (tied)
  /// has one slot. A tensor that does not require grad (frozen) has none.
  explicit FlatLayout(const NamedParameters& parameters);

  /// Sorted by group. [slot]
  const std::vector<FlatSlot>& slots() const { return slots_; }
  /// The slots in the order of their places in the buffers, as one sequence for all groups.
  /// [position]
  const std::vector<int64_t>& order() const { return order_; }
  /// Gives every slot a new offset in this order. The sizes of the groups do not change. Throws
  /// InputError if `order` is not a permutation of the slots.
  void reorder(std::vector<int64_t> order);
  /// In order of first appearance. [group]
  const std::vector<FlatGroup>& groups() const { return groups_; }
  /// The slot of this tensor object; -1 if it has none.
  int64_t find(const at::Tensor& parameter) const;
  /// Whether the slot's parameter has the shape, dtype and device that it had.
  bool fits(int64_t slot) const;
  /// Whether the loss depends on each slot's parameter. Walks the loss's graph. [slot]
  std::vector<char> reachable(const at::Tensor& loss) const;

 private:
  std::vector<FlatSlot> slots_{};
  std::vector<FlatGroup> groups_{};
  std::vector<int64_t> order_{};
  std::unordered_map<const void*, int64_t> index_{}; // TensorImpl -> slot
};

} // namespace hasten
