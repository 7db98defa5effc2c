// What a deferred_init() has seen: enough to make each storage's contents again.
//
// Note [Deferred log]
// An entry is an operator that made or changed contents of a storage of the scope, with
// its arguments as they were. In arguments each such storage is replaced by its twin, a
// storage of the log that has memory only while entries run, so the log keeps no tensor
// of the model alive, and a replay touches none before it has succeeded. A replay of
// some storages runs the entries that these depend on, in order, from the last one that
// overwrote a storage as a whole; random ones from the generator's state of then.
// A deferred storage knows its log by the context of its empty DataPtr: when the storage
// dies, or gets memory, it lets go of the log.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hasten::detail {

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};
GeneratorState state_now(at::Generator generator);

struct DeferredOp {
  std::optional<c10::OperatorHandle> op{}; // none: contents are all
  c10::DispatchKeySet below{};
  std::vector<c10::IValue> arguments{}; // their tensors: on twins, or outside's
  std::vector<std::pair<at::Tensor, uint32_t>> outside{}; // with versions
  std::vector<at::Tensor> changes{}; // of outside's: each run gets copies
  std::vector<size_t> reads{}; // storages
  std::vector<size_t> writes{};
  std::vector<std::pair<size_t, size_t>> creates{}; // which result, storage
  std::optional<size_t> overwrites{}; // whose former contents do not matter
  size_t overwritten_bytes = 0;
  std::vector<GeneratorState> generators{};
  caffe2::TypeMeta default_dtype{};
  at::Tensor contents{}; // bytes
};

class DeferredLog : public std::enable_shared_from_this<DeferredLog> {
 public:
  size_t add(const at::Tensor& tensor);
  /// The tensor, on its storage's twin; without autograd.
  at::Tensor on_twin(const at::Tensor& tensor, size_t storage) const;
  void append(DeferredOp op) { ops_.push_back(std::move(op)); }
  /// An outside tensor is about to change: what refers to it gets a copy.
  void before_change(const at::Tensor& outside);
  /// Null: nobody has it any more.
  c10::intrusive_ptr<c10::StorageImpl> find(size_t storage) const {
    return storages_[storage].real.lock();
  }

  /// The storage lets go of its memory.
  void evict(size_t storage);
  /// Gives evicted storages memory and contents, all or none; dead ones are left out.
  void restore(const std::vector<size_t>& storages);
  /// Memory alone.
  void allocate(size_t storage);
  /// Forgets entries that no evicted storage needs.
  void prune();

  bool open = true; // its scope lives

 private:
  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> real;
    c10::intrusive_ptr<c10::StorageImpl> twin;
  };
  struct Step {
    size_t op = 0;
    std::vector<size_t> done{}; // storages that no later step uses
  };

  std::vector<Step> slice_of(const std::vector<size_t>& storages) const;
  void run(DeferredOp& op);
  void take_results(const DeferredOp& op, const torch::jit::Stack& results);

  std::vector<Storage> storages_{};
  std::vector<DeferredOp> ops_{};
};

/// A deferred storage's place.
struct DeferredPlace {
  std::shared_ptr<DeferredLog> log;
  size_t storage = 0;
};
/// Null: not deferred.
const DeferredPlace* deferred_place(const at::Tensor& tensor);
const DeferredPlace* deferred_place(c10::StorageImpl& storage);

/// The value with change(tensor) in each tensor's place, in lists, too.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change);

/// Tensor::is_alias_of would ask a deferred one for its pointer.
inline bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

/// The tensor without autograd, sharing its version.
at::Tensor without_graph(const at::Tensor& tensor);
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference()
             ? 0
             : static_cast<uint32_t>(
                   tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

} // namespace hasten::detail
