// The log of a deferred_init(): enough to compute the contents of each storage again.
//
// Note [Deferred log]
// An entry is an operator that created or changed contents of a storage of the scope, with its
// arguments at that time. In the arguments each such storage is replaced by its twin, a storage of
// the log that has memory only during a replay. So the log keeps no tensor of the model alive, and
// a replay changes no tensor before it has succeeded. A replay of some storages runs the entries on
// which they depend, in order, starting at the last entry that overwrote a whole storage. Entries
// that draw random values start from the generator state at that time.
// The context of a deferred storage's empty DataPtr refers to its log. The reference ends when the
// storage is destroyed or gets memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hasten/core/device.h"
#include "hasten/core/op_scope.h"

namespace hasten::detail {

/// A tensor's bytes [begin, end) in its storage.
struct DeferredRange {
  size_t storage = 0;
  size_t begin = 0;
  size_t end = 0;
};

struct DeferredOp {
  std::optional<c10::OperatorHandle> op{}; // none: sets `contents`
  c10::DispatchKeySet below{};
  std::vector<c10::IValue> arguments{}; // their tensors use twins, or are outside the scope
  std::vector<std::pair<at::Tensor, uint32_t>> outside{}; // with their versions
  std::vector<at::Tensor> changes{}; // outside tensors that it changes: each run gets copies
  std::vector<DeferredRange> reads{};
  std::vector<DeferredRange> writes{};
  std::vector<std::pair<size_t, size_t>> creates{}; // index of the result, storage
  std::optional<DeferredRange> overwrites{}; // the whole storage that it overwrites
  GeneratorStates generators{}; // those from which it drew, as they were before
  caffe2::TypeMeta default_dtype{};
  at::Tensor contents{}; // bytes
};

class DeferredLog : public std::enable_shared_from_this<DeferredLog> {
 public:
  size_t add(const at::Tensor& tensor);
  /// The tensor with its storage's twin as storage, without autograd.
  at::Tensor on_twin(const at::Tensor& tensor, size_t storage) const;
  void append(DeferredOp op) { ops_.push_back(std::move(op)); }
  /// Call it before an outside tensor changes. Entries that refer to it get a copy.
  void before_change(const at::Tensor& outside);
  /// Null if the storage has been destroyed.
  c10::intrusive_ptr<c10::StorageImpl> find(size_t storage) const {
    return storages_[storage].real.lock();
  }

  /// Frees the storage's memory.
  void evict(size_t storage);
  /// Gives evicted storages memory and contents, all or none. Skips destroyed ones.
  void restore(const std::vector<size_t>& storages);
  /// Gives the storage memory without contents.
  void allocate(size_t storage);
  /// Drops entries that no evicted storage needs.
  void prune();

  bool open = true; // the scope is still open

 private:
  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> real;
    c10::intrusive_ptr<c10::StorageImpl> twin;
  };
  struct Step {
    size_t op = 0;
    std::vector<size_t> done{}; // storages that no later step uses
  };

  bool is_evicted(size_t storage) const;
  std::vector<Step> slice_of(const std::vector<size_t>& storages) const;
  void replay(const std::vector<Step>& steps, const std::unordered_set<size_t>& targets);
  void run(DeferredOp& op);
  void take_results(const DeferredOp& op, const torch::jit::Stack& results);

  std::vector<Storage> storages_{};
  std::vector<DeferredOp> ops_{};
};

/// Identifies a deferred storage.
struct DeferredPlace {
  std::shared_ptr<DeferredLog> log;
  size_t storage = 0;
};
/// Null if the tensor is not deferred.
const DeferredPlace* deferred_place(const at::Tensor& tensor);
const DeferredPlace* deferred_place(c10::StorageImpl& storage);

/// Tensor::is_alias_of would read the pointer of a deferred tensor, which throws.
inline bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

/// The tensor without autograd. It shares the version counter.
at::Tensor without_graph(const at::Tensor& tensor);
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference()
             ? 0
             : static_cast<uint32_t>(
                   tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

} // namespace hasten::detail
