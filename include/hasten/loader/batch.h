// What a prepared loader needs to know about batches: how many samples they have, how to move them
// to a device, how to split and join them. These types work without further code:
//   * hasten::Batch, map<string, Tensor>, Tensor, pair, tuple, vector of Tensors,
//     torch::data::Example, structs whose members are all Tensors (up to 8), and structs with
//     `flatten` (hasten/core/block_call.h). Dimension 0 of the first tensor that is not 0-d is the
//     number of samples; 0-d tensors belong to all samples.
//   * vector of any of these, as torch::data's loaders without Stack return: each element is a
//     sample.
// Other types need free functions in their own namespace:
//   int64_t rows(const MyBatch& batch);
//   MyBatch to_device(MyBatch batch, const at::Device& device);
// Splitting, joining and sending (split_batches, even_batches, dispatch_batches) use the tensors.
// Members that are not tensors are then those of the batch that was split or, on ranks to which a
// batch is sent, default values. All functions are local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hasten/core/block_call.h"
#include "hasten/data/dataset.h"

namespace hasten::detail {

// In an initialiser it converts to a Tensor and to nothing else; never evaluated.
struct OnlyTensor {
  operator at::Tensor() const; // NOLINT: it must convert implicitly
};
template <typename T, size_t... I>
constexpr bool initialised_by_tensors(std::index_sequence<I...>) {
  return requires { T{(static_cast<void>(I), OnlyTensor())...}; };
}
// Number of members of a struct that has only Tensors; 0 for all other types.
template <typename T, size_t N = 8>
constexpr size_t tensor_members() {
  if constexpr (!std::is_aggregate_v<T> || std::is_array_v<T> || N == 0) {
    return 0;
  } else if constexpr (sizeof(T) == N * sizeof(at::Tensor) &&
                       initialised_by_tensors<T>(std::make_index_sequence<N>())) {
    return N;
  } else {
    return tensor_members<T, N - 1>();
  }
}

template <typename T, typename Visit>
void visit_members(T& value, Visit& visit) {
  constexpr size_t n = tensor_members<T>();
  const auto all = [&visit](auto&... member) { (visit(member), ...); };
  if constexpr (n == 1) {
    auto& [a] = value;
    all(a);
  } else if constexpr (n == 2) {
    auto& [a, b] = value;
    all(a, b);
  } else if constexpr (n == 3) {
    auto& [a, b, c] = value;
    all(a, b, c);
  } else if constexpr (n == 4) {
    auto& [a, b, c, d] = value;
    all(a, b, c, d);
  } else if constexpr (n == 5) {
    auto& [a, b, c, d, e] = value;
    all(a, b, c, d, e);
  } else if constexpr (n == 6) {
    auto& [a, b, c, d, e, f] = value;
    all(a, b, c, d, e, f);
  } else if constexpr (n == 7) {
    auto& [a, b, c, d, e, f, g] = value;
    all(a, b, c, d, e, f, g);
  } else {
    auto& [a, b, c, d, e, f, g, h] = value;
    all(a, b, c, d, e, f, g, h);
  }
}

template <typename T>
inline constexpr bool kIsVector = false;
template <typename E>
inline constexpr bool kIsVector<std::vector<E>> = true;
// A batch whose elements are its samples.
template <typename T>
inline constexpr bool kListsRows = false;
template <typename E>
inline constexpr bool kListsRows<std::vector<E>> =
    !std::is_same_v<E, at::Tensor> && !std::is_arithmetic_v<E>;

// A batch whose tensors have names.
using TensorMap = std::map<std::string, at::Tensor>;
template <typename T>
inline constexpr bool kNamesTensors = std::is_same_v<T, Batch> || std::is_same_v<T, TensorMap>;
inline TensorMap& named_tensors(Batch& batch) { return batch.tensors; }
inline TensorMap& named_tensors(TensorMap& batch) { return batch; }

// Calls `visit`, a TensorVisitor, on every tensor found in `batch`, in order.
template <typename Value, typename Visit>
void visit_batch(Value& batch, Visit& visit) {
  if constexpr (kNamesTensors<Value>) {
    for (auto& entry : named_tensors(batch)) {
      visit(entry.second);
    }
  } else if constexpr (requires { flatten(visit, batch); }) {
    visit(batch);
  } else if constexpr (requires {
                         batch.data;
                         batch.target;
                       }) {
    visit(batch.data); // torch::data::Example
    visit(batch.target);
  } else if constexpr (kListsRows<Value>) {
    for (auto& row : batch) {
      visit_batch(row, visit);
    }
  } else if constexpr (tensor_members<Value>() > 0) {
    visit_members(batch, visit);
  } else {
    visit(batch);
  }
}

// Whether tensors are found in a value of this type.
template <typename T>
inline constexpr bool kOwnsTensors =
    std::is_same_v<T, at::Tensor> || std::is_same_v<T, Batch> || tensor_members<T>() > 0 ||
    requires(T& value, TensorTaker& visit) { flatten(visit, value); } ||
    requires(T& value) { value.data, value.target; };
template <typename T>
inline constexpr bool kHasTensors = kOwnsTensors<T>;
template <template <typename...> class C, typename... T>
inline constexpr bool kHasTensors<C<T...>> = kOwnsTensors<C<T...>> || (kHasTensors<T> || ...);

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

// Replaces every tensor in `value`. Returns how many there were.
template <typename Value, typename Change>
int64_t change_tensors(Value& value, Change change) {
  TensorChanger<Change> changer(std::move(change));
  visit_batch(value, changer);
  return changer.seen;
}
[[noreturn]] void throw_no_tensor_inside();

// Number of samples of a batch; empty if the type does not have it.
template <typename Value>
std::optional<int64_t> batch_rows(const Value& batch) {
  if constexpr (requires {
                  { rows(batch) } -> std::convertible_to<int64_t>;
                }) {
    return static_cast<int64_t>(rows(batch));
  } else if constexpr (kListsRows<Value>) {
    return static_cast<int64_t>(batch.size());
  } else {
    std::optional<int64_t> found;
    Value copy = batch;
    change_tensors(copy, [&found](const at::Tensor& tensor) {
      if (!found && tensor.dim() > 0) {
        found = tensor.size(0);
      }
      return tensor;
    });
    return found;
  }
}

// The tensors of a batch, for code that is the same for all types.
struct PackedBatch {
  std::vector<at::Tensor> tensors{}; // undefined if the batch's are
  std::vector<std::string> names{}; // of the tensors, if the type has names
  std::vector<int64_t> indices{}; // of a hasten::Batch
  int64_t rows = 0;
  bool lists_rows = false; // each sample has its own tensors, in sequence
};

// Samples begin … begin + count - 1, as views. Throws InputError if dimension 0 of a tensor is not
// the number of samples.
PackedBatch packed_rows(const PackedBatch& batch, int64_t begin, int64_t count);
// The samples of all batches in new memory. Throws InputError if shapes do not match.
PackedBatch packed_concat(const std::vector<PackedBatch>& batches);
// `batch` followed by samples of `first`, repeated until it has `rows` samples.
PackedBatch packed_filled(PackedBatch batch, const std::vector<PackedBatch>& first, int64_t rows);
// Number of samples of a full global batch, from the first one. `only`: the first one is also the
// last, so it may not be full. Throws InputError if a full one is not divisible.
int64_t even_rows(const std::vector<PackedBatch>& first, bool split, int64_t world_size, bool only);

template <typename Value>
PackedBatch pack_batch(Value batch) {
  PackedBatch packed;
  packed.rows = batch_rows(batch).value_or(0);
  packed.lists_rows = kListsRows<Value>;
  TensorTaker take;
  visit_batch(batch, take);
  packed.tensors = std::move(take.tensors);
  if constexpr (kNamesTensors<Value>) {
    for (const auto& entry : named_tensors(batch)) {
      packed.names.push_back(entry.first);
    }
  }
  if constexpr (std::is_same_v<Value, Batch>) {
    packed.indices = batch.indices;
  }
  return packed;
}

// The batch again; members that are not tensors are those of `like`.
template <typename Value>
Value unpack_batch(PackedBatch packed, Value like) {
  if constexpr (kNamesTensors<Value>) {
    auto& tensors = named_tensors(like);
    tensors.clear();
    for (size_t i = 0; i < packed.names.size(); ++i) {
      tensors[packed.names[i]] = packed.tensors[i];
    }
    if constexpr (std::is_same_v<Value, Batch>) {
      like.indices = std::move(packed.indices);
      like.padded = true; // the samples may be those of several batches
    }
  } else {
    if constexpr (kListsRows<Value>) {
      if (like.empty() || packed.rows <= static_cast<int64_t>(like.size())) {
        like.resize(static_cast<size_t>(packed.rows));
      } else { // more samples than before: copies of the first
        like.resize(static_cast<size_t>(packed.rows), like.front());
      }
    } else if constexpr (kIsVector<Value>) {
      like.resize(packed.tensors.size());
    }
    TensorPutter put(std::move(packed.tensors));
    visit_batch(like, put);
  }
  return like;
}

// A batch of the same type without samples; empty if the type has no tensors.
template <typename Value>
std::optional<Value> batch_without_rows(Value batch) {
  if constexpr (kListsRows<Value>) {
    batch.clear();
    return batch;
  } else {
    if constexpr (std::is_same_v<Value, Batch>) {
      batch.indices.clear();
    }
    const int64_t seen = change_tensors(batch, [](const at::Tensor& tensor) {
      return tensor.dim() > 0 ? tensor.narrow(0, 0, 0) : tensor;
    });
    return seen > 0 ? std::optional<Value>(std::move(batch)) : std::nullopt;
  }
}

} // namespace hasten::detail
