// Where each parameter's gradient lies in a few flat buffers, one per dtype and
// device. Gradients of 16-bit parameters are fp32: what is summed over batches and
// ranks loses nothing to 16 bits. Equal on all ranks that build the same model. A slot keeps its index;
// where it lies changes when somebody reorders the layout, which is done once.
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
  /// First name under which the parameter is registered.
  std::string name{};
  at::Tensor parameter{};
  /// The parameter's when the layout was made.
  std::vector<int64_t> sizes{};
  /// Of the gradient in the buffer: the parameter's at that time, or row-major where
  /// those leave holes or overlap.
  std::vector<int64_t> strides{};
  at::ScalarType dtype = at::kFloat;
  /// Index into groups().
  int64_t group = 0;
  /// First element in the group's buffer, a multiple of 64 bytes.
  int64_t offset = 0;
  /// Elements, without the padding behind them.
  int64_t numel = 0;
};

/// Parameters whose gradients have one dtype, on one device, share a buffer.
struct FlatGroup {
  /// Of the gradients: flat_gradient_dtype of the parameters'.
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  /// Elements of the buffer, padding included.
  int64_t numel = 0;
  /// Its slots: [first_slot, last_slot).
  int64_t first_slot = 0;
  int64_t last_slot = 0;
};

/// kFloat for kHalf and kBFloat16, else the same.
at::ScalarType flat_gradient_dtype(at::ScalarType parameter_dtype);

namespace detail {
/// Elements that a slot of `numel` takes, up to the next 64 bytes.
int64_t flat_padded(int64_t numel, at::ScalarType dtype);
} // namespace detail

class FlatLayout {
 public:
  using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

  FlatLayout() = default;
  /// From parameters in the order of registration: slots are laid out in reverse
  /// order, which is about the order in which backward completes gradients. A
  /// tensor listed twice (tied) is one slot; one that requires no grad (frozen)
  /// is left out.
  explicit FlatLayout(const NamedParameters& parameters);

  /// By group. [slot]
  const std::vector<FlatSlot>& slots() const { return slots_; }
  /// Slots as they lie in the buffers, those of all groups in one sequence.
  /// [position]
  const std::vector<int64_t>& order() const { return order_; }
  /// Gives every slot a new offset, by this order. Groups stay as large as they
  /// are. Throws InputError where it is no permutation of the slots.
  void reorder(std::vector<int64_t> order);
  /// In order of first appearance. [group]
  const std::vector<FlatGroup>& groups() const { return groups_; }
  /// Slot of a parameter, by identity; -1 if it has none.
  int64_t find(const at::Tensor& parameter) const;

 private:
  std::vector<FlatSlot> slots_{};
  std::vector<FlatGroup> groups_{};
  std::vector<int64_t> order_{};
  std::unordered_map<const void*, int64_t> index_{}; // TensorImpl -> slot
};

} // namespace hasten
