#include "deferred_log.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstring>

#include "hasten/base/error.h"
#include "hasten/core/recompute.h"

namespace hasten::detail {

constexpr const char* kDeferredRead =
    "[core::deferred_init] a tensor of a deferred model was used before it had values. "
    "Fix: call hasten::materialize(model) first, or use accelerator.prepare(model), Ddp or "
    "FullyShard, which do so.";

static void free_place(void* place) { delete static_cast<DeferredPlace*>(place); }

const DeferredPlace* deferred_place(c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &free_place ? static_cast<const DeferredPlace*>(data.get_context())
                                           : nullptr;
}

const DeferredPlace* deferred_place(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage()
             ? deferred_place(*tensor.storage().unsafeGetStorageImpl())
             : nullptr;
}

at::Tensor without_graph(const at::Tensor& tensor) {
  const at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto version = tensor.is_inference() ? c10::VariableVersion() : impl->version_counter();
  return at::Tensor(impl->shallow_copy_and_detach(version, true));
}

static void free_memory(c10::StorageImpl& twin) {
  twin.set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  twin.set_nbytes(size_t{0});
}

// Allocates new memory of `bytes` bytes.
static void give_memory(c10::StorageImpl& storage, size_t bytes) {
  storage.set_data_ptr_noswap(c10::GetCPUAllocator()->allocate(bytes));
  storage.set_nbytes(bytes);
}

size_t DeferredLog::add(const at::Tensor& tensor) {
  storages_.push_back(
      {tensor.storage().getWeakStorageImpl(),
       c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(0),
                                             c10::DataPtr(nullptr, c10::Device(c10::kCPU)),
                                             c10::GetCPUAllocator(), true)});
  return storages_.size() - 1;
}

at::Tensor DeferredLog::on_twin(const at::Tensor& tensor, size_t storage) const {
  auto impl = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  impl->set_storage_keep_dtype(c10::Storage(storages_[storage].twin));
  return at::Tensor(std::move(impl));
}

void DeferredLog::before_change(const at::Tensor& outside) {
  for (DeferredOp& op : ops_) {
    for (auto& [held, version] : op.outside) {
      if (!same_storage(held, outside)) {
        continue;
      }
      const at::AutoDispatchBelowADInplaceOrView below;
      const at::Tensor copy = held.clone();
      for (c10::IValue& argument : op.arguments) {
        argument = map_tensors(argument, [&](const at::Tensor& tensor) {
          return tensor.is_same(held) ? copy : tensor;
        });
      }
      held = copy;
      version = version_of(copy);
    }
  }
}

void DeferredLog::evict(size_t storage) {
  const auto real = find(storage);
  real->set_data_ptr_noswap({nullptr, new DeferredPlace{shared_from_this(), storage}, &free_place,
                             c10::Device(c10::kCPU)});
  real->release_data_and_set_meta_custom_data_ptr_error_msg_(kDeferredRead);
}

// LibTorch 2.11 has no function that ends the refusal of reads. Its flag is private, and only an
// explicit instantiation may name it.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
void allow_reads(c10::StorageImpl& storage);
template <bool c10::StorageImpl::*kRefused>
struct ReadsFlag {
  friend void allow_reads(c10::StorageImpl& storage) { storage.*kRefused = false; }
};
template struct ReadsFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#else
static void allow_reads(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#endif

static void give_data(c10::StorageImpl& real, c10::DataPtr&& data) {
  allow_reads(real);
  real.set_data_ptr_noswap(std::move(data)); // also brings other flags up to date
}

void DeferredLog::allocate(size_t storage) {
  if (is_evicted(storage)) {
    const auto real = find(storage);
    give_data(*real, c10::GetCPUAllocator()->allocate(real->nbytes()));
  }
}

bool DeferredLog::is_evicted(size_t storage) const {
  const auto real = find(storage);
  return real && deferred_place(*real) != nullptr;
}

// Goes backwards. An entry counts if it creates contents that a later entry needs.
std::vector<DeferredLog::Step> DeferredLog::slice_of(const std::vector<size_t>& storages) const {
  std::vector<Step> steps;
  std::unordered_set<size_t> needed(storages.begin(), storages.end());
  std::unordered_set<size_t> used;
  for (size_t i = ops_.size(); i-- > 0 && !needed.empty();) {
    const DeferredOp& op = ops_[i];
    const auto is_needed = [&](size_t s) { return needed.count(s) > 0; };
    if (std::ranges::none_of(
            op.writes, [&](const DeferredRange& range) { return is_needed(range.storage); }) &&
        std::ranges::none_of(op.creates, [&](const auto& c) { return is_needed(c.second); })) {
      continue;
    }
    Step& step = steps.emplace_back();
    step.op = i;
    const auto use = [&](size_t s, bool before) {
      if (used.insert(s).second) {
        step.done.push_back(s);
      }
      before ? static_cast<void>(needed.insert(s)) : static_cast<void>(needed.erase(s));
    };
    for (const auto& [result, s] : op.creates) {
      use(s, false);
    }
    if (op.overwrites) {
      use(op.overwrites->storage, false);
    }
    for (const DeferredRange& range : op.reads) {
      use(range.storage, true);
    }
  }
  std::ranges::reverse(steps);
  return steps;
}

// Operators in kernels see the default dtype and random states of that time and no autograd,
// autocast or observer.
void DeferredLog::replay(const std::vector<Step>& steps,
                         const std::unordered_set<size_t>& targets) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const UnseenOps unseen;
  GeneratorStates before;
  const auto put_back = c10::make_scope_exit([&before, dtype = c10::get_default_dtype()] {
    set_generator_states(before);
    c10::set_default_dtype(dtype);
  });
  for (const Step& step : steps) {
    for (const GeneratorState& then : ops_[step.op].generators) {
      add_generator_state(before, then.generator());
      then.restore();
    }
    run(ops_[step.op]);
    for (const size_t s : step.done) {
      if (targets.count(s) == 0) {
        free_memory(*storages_[s].twin);
      }
    }
  }
}

void DeferredLog::restore(const std::vector<size_t>& storages) {
  std::vector<size_t> wanted;
  std::unordered_set<size_t> targets;
  for (const size_t s : storages) {
    // A tied tensor occurs twice, but its storage gets memory once.
    if (is_evicted(s) && targets.insert(s).second) {
      wanted.push_back(s);
    }
  }
  const std::vector<Step> steps = slice_of(wanted);
  const auto free_twins = c10::make_scope_exit([&] {
    for (const Step& step : steps) {
      for (const size_t s : step.done) {
        free_memory(*storages_[s].twin);
      }
    }
  });
  replay(steps, targets);
  for (const size_t s : wanted) {
    c10::StorageImpl& twin = *storages_[s].twin;
    const auto real = find(s);
    TORCH_INTERNAL_ASSERT(twin.nbytes() == real->nbytes());
    give_data(*real, std::move(twin._mutable_data_ptr_no_checks()));
  }
}

void DeferredLog::run(DeferredOp& op) {
  if (op.overwrites) {
    give_memory(*storages_[op.overwrites->storage].twin, op.overwrites->end);
  }
  if (!op.op) {
    std::memcpy(storages_[op.overwrites->storage].twin->mutable_data(),
                op.contents.const_data_ptr(), op.overwrites->end);
    return;
  }
  for (const auto& [tensor, version] : op.outside) {
    if (version_of(tensor) != version) {
      throw InputError("core::materialize",
                       "a tensor outside deferred_init has changed since " +
                           op.op->operator_name().name + " read it",
                       "the tensor unchanged, because parameters are computed from it",
                       "materialize the model before the tensor changes, or pass a copy");
    }
  }
  c10::set_default_dtype(op.default_dtype);
  torch::jit::Stack stack;
  for (const c10::IValue& argument : op.arguments) {
    // An operator may change the sizes of its argument.
    stack.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
      const bool changes = std::ranges::any_of(
          op.changes, [&](const at::Tensor& other) { return other.is_same(tensor); });
      return changes ? tensor.clone() : without_graph(tensor);
    }));
  }
  op.op->redispatchBoxed(op.below, &stack);
  take_results(op, stack);
}

void DeferredLog::take_results(const DeferredOp& op, const torch::jit::Stack& results) {
  size_t number = 0;
  for (const c10::IValue& value : results) {
    visit_tensors(value, [&](const at::Tensor& tensor) {
      const auto made = std::ranges::find(op.creates, number++, &std::pair<size_t, size_t>::first);
      if (made == op.creates.end()) {
        return;
      }
      c10::StorageImpl& result = *tensor.storage().unsafeGetStorageImpl();
      c10::StorageImpl& twin = *storages_[made->second].twin;
      if (tensor.use_count() == 1 && tensor.storage().use_count() == 1) {
        twin.set_data_ptr_noswap(std::move(result._mutable_data_ptr_no_checks()));
        twin.set_nbytes(result.nbytes());
      } else {
        give_memory(twin, result.nbytes());
        std::memcpy(twin.mutable_data(), result.data(), result.nbytes());
      }
    });
  }
}

void DeferredLog::prune() {
  std::vector<size_t> waiting;
  for (size_t s = 0; s < storages_.size(); ++s) {
    if (is_evicted(s)) {
      waiting.push_back(s);
    }
  }
  std::vector<DeferredOp> kept;
  for (const Step& step : slice_of(waiting)) {
    kept.push_back(std::move(ops_[step.op]));
  }
  ops_ = std::move(kept);
}

} // namespace hasten::detail
