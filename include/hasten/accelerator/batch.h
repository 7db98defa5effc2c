// What a prepared loader must know about batches: how many rows they hold, how to
// bring them to a device, and what the same batch without rows looks like.
// Understood as they are: hasten::Batch, Tensor, vector, pair or tuple of Tensors,
// torch::data::Example, and structs with `flatten` (hasten/core/block_call.h),
// whose first tensor's dim 0 is the row. Another type joins by free functions in
// its own namespace:
//   int64_t rows(const MyBatch& batch);
//   MyBatch to_device(MyBatch batch, const at::Device& device);
// All local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include "hasten/core/block_call.h"
#include "hasten/data/dataset.h"

namespace hasten::detail {

// Calls `visit` on every tensor found in `batch`, in order.
template <typename Batch, typename Visit>
void visit_batch(Batch& batch, Visit& visit) {
  if constexpr (requires {
                  batch.data;
                  batch.target;
                }) {
    visit(batch.data); // torch::data::Example
    visit(batch.target);
  } else {
    visit(batch);
  }
}

template <typename Change>
struct TensorChanger : TensorVisitor<TensorChanger<Change>> {
  explicit TensorChanger(Change change) : change(std::move(change)) {}
  Change change;
  int64_t seen = 0;
  void slot(at::Tensor& tensor) {
    if (tensor.defined()) {
      tensor = change(tensor);
      ++seen;
    }
  }
};

// Rows of a batch; nothing where the type does not tell.
template <typename Value>
std::optional<int64_t> batch_rows(const Value& batch) {
  if constexpr (requires {
                  { rows(batch) } -> std::convertible_to<int64_t>;
                }) {
    return static_cast<int64_t>(rows(batch));
  } else {
    std::optional<int64_t> found;
    TensorChanger look([&found](const at::Tensor& tensor) {
      if (!found && tensor.dim() > 0) {
        found = tensor.size(0);
      }
      return tensor;
    });
    Value copy = batch;
    visit_batch(copy, look);
    return found;
  }
}

template <typename Value>
Value batch_to_device(Value batch, const at::Device& device) {
  if constexpr (requires { to_device(std::move(batch), device); }) {
    return to_device(std::move(batch), device);
  } else if constexpr (requires {
                         { batch.to(device) } -> std::same_as<Value>;
                       }) {
    return batch.to(device);
  } else {
    TensorChanger move(
        [&device](const at::Tensor& tensor) { return tensor.to(device); });
    visit_batch(batch, move);
    return batch;
  }
}

// The same kind of batch with no rows; nothing where no tensor is found in it.
template <typename Value>
std::optional<Value> batch_without_rows(Value batch) {
  TensorChanger cut([](const at::Tensor& tensor) {
    return tensor.dim() > 0 ? tensor.narrow(0, 0, 0) : tensor;
  });
  if constexpr (std::is_same_v<Value, Batch>) {
    for (auto& entry : batch.tensors) {
      cut(entry.second);
    }
    batch.indices.clear();
  } else {
    visit_batch(batch, cut);
  }
  return cut.seen > 0 ? std::optional<Value>(std::move(batch)) : std::nullopt;
}

} // namespace hasten::detail
