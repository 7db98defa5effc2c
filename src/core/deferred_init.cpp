#include "hasten/core/deferred_init.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "deferred_log.h"
#include "hasten/base/error.h"
#include "hasten/core/op_scope.h"

namespace hasten {
namespace detail {

// Changes of contents are found by hashes of pieces of this many bytes.
constexpr size_t kDeferredPiece = 256 << 10;

static thread_local bool deferred_scope_open = false;

// Operators for which the previous values of the first argument do not matter.
static bool overwrites_first(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::copy_",      "aten::fill_",   "aten::zero_",      "aten::uniform_",
      "aten::normal_",    "aten::random_", "aten::bernoulli_", "aten::exponential_",
      "aten::geometric_", "aten::cauchy_", "aten::log_normal_"};
  return names.count(name) > 0;
}

static bool is_deferrable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.device().is_cpu() &&
         tensor.layout() == at::kStrided && tensor.storage().nbytes() > 0;
}

static std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  const std::vector<at::Tensor> buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

static DeferredRange range_of(const at::Tensor& tensor, size_t storage) {
  const auto offset = static_cast<size_t>(tensor.storage_offset());
  return {storage, offset * tensor.itemsize(),
          at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                           offset)};
}

static bool covers_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
}

// The states of torch's CPU generator and of those that the operator was given.
static GeneratorStates states_before(const OpPassing& passing) {
  GeneratorStates states(1);
  for (const c10::IValue& argument : passing.arguments()) {
    if (argument.isGenerator() && argument.toGenerator().device().is_cpu()) {
      add_generator_state(states, argument.toGenerator());
    }
  }
  return states;
}

// Operators of the scope run and are recorded. Storages that they created lose their memory when
// they exceed the limit, the least recently used first. Contents are hashed after each operator
// that changed them, and compared before they are read or freed. So writes through a pointer are
// found, and these contents are recorded.
class DeferredRecorder final : public OpObserver {
 public:
  explicit DeferredRecorder(const DeferredInitOptions& options)
      : resident_bytes_(options.resident_bytes) {
    deferred_scope_open = true;
  }
  DeferredRecorder(const DeferredRecorder&) = delete;
  DeferredRecorder& operator=(const DeferredRecorder&) = delete;
  ~DeferredRecorder() override {
    log_->open = false;
    deferred_scope_open = false;
  }

  void pass(const OpPassing& passing) override;
  void finish(const torch::nn::Module& module);

 private:
  struct Tracked {
    std::vector<uint64_t> hashes{}; // [piece]
    int64_t bytes = 0;
    uint64_t used = 0; // number of the last operator that used it
    bool resident = true;
  };
  // An operator's effects on tensors.
  struct Passing {
    DeferredOp op{};
    std::vector<at::Tensor> outside{};
  };

  Passing describe(const OpPassing& passing);
  at::Tensor describe_tensor(const at::Tensor& tensor, bool write, Passing& described);
  std::optional<size_t> find(const at::Tensor& tensor) const;
  void bring(const Passing& described);
  void note_results(const OpPassing& passing, Passing& described);
  void hash(size_t storage, size_t begin, size_t end);
  void verify(size_t storage, size_t begin, size_t end);
  void keep_contents(size_t storage, c10::StorageImpl& real);
  void evict(size_t storage);
  void make_room();

  int64_t resident_bytes_;
  std::shared_ptr<DeferredLog> log_ = std::make_shared<DeferredLog>();
  std::unordered_map<const c10::StorageImpl*, size_t> known_{};
  std::vector<Tracked> tracked_{}; // [storage]
  int64_t resident_ = 0; // bytes, including storages that were destroyed meanwhile
  uint64_t count_ = 0; // number of operators
  std::optional<OpScope> scope_{std::in_place, this};
};

std::optional<size_t> DeferredRecorder::find(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) {
    return {};
  }
  const auto known = known_.find(tensor.storage().unsafeGetStorageImpl());
  return known == known_.end() ? std::nullopt : std::optional(known->second);
}

static uint64_t hash_piece(const c10::StorageImpl& real, size_t piece) {
  const size_t begin = piece * kDeferredPiece;
  return XXH3_64bits(static_cast<const char*>(real.data()) + begin,
                     std::min(kDeferredPiece, real.nbytes() - begin));
}

void DeferredRecorder::hash(size_t storage, size_t begin, size_t end) {
  const auto real = log_->find(storage);
  Tracked& tracked = tracked_[storage];
  if (!real) {
    return;
  }
  const size_t pieces = (real->nbytes() + kDeferredPiece - 1) / kDeferredPiece;
  if (pieces != tracked.hashes.size() || tracked.bytes != static_cast<int64_t>(real->nbytes())) {
    resident_ += static_cast<int64_t>(real->nbytes()) - tracked.bytes;
    tracked.bytes = static_cast<int64_t>(real->nbytes());
    tracked.hashes.resize(pieces);
    begin = 0;
    end = real->nbytes();
  }
  for (size_t piece = begin / kDeferredPiece; piece < pieces && piece * kDeferredPiece < end;
       ++piece) {
    tracked.hashes[piece] = hash_piece(*real, piece);
  }
}

void DeferredRecorder::verify(size_t storage, size_t begin, size_t end) {
  const auto real = log_->find(storage);
  const Tracked& tracked = tracked_[storage];
  for (size_t piece = begin / kDeferredPiece;
       piece < tracked.hashes.size() && piece * kDeferredPiece < end; ++piece) {
    if (tracked.hashes[piece] != hash_piece(*real, piece)) {
      keep_contents(storage, *real);
      return;
    }
  }
}

void DeferredRecorder::keep_contents(size_t storage, c10::StorageImpl& real) {
  DeferredOp op;
  op.overwrites = {storage, 0, real.nbytes()};
  op.writes = {*op.overwrites};
  op.contents =
      at::detail::empty_cpu({static_cast<int64_t>(real.nbytes())}, at::TensorOptions(at::kByte));
  std::memcpy(op.contents.mutable_data_ptr(), real.data(), real.nbytes());
  log_->append(std::move(op));
  hash(storage, 0, real.nbytes());
}

at::Tensor DeferredRecorder::describe_tensor(const at::Tensor& tensor, bool write,
                                             Passing& described) {
  if (const auto storage = find(tensor)) {
    const DeferredRange range = range_of(tensor, *storage);
    described.op.reads.push_back(range);
    if (write) {
      described.op.writes.push_back(range);
    }
    return log_->on_twin(tensor, *storage);
  }
  if (!tensor.has_storage()) {
    described.op.outside.emplace_back(tensor, version_of(tensor));
    return tensor;
  }
  described.outside.push_back(tensor);
  at::Tensor held;
  if (write) {
    log_->before_change(tensor);
    const at::AutoDispatchBelowADInplaceOrView below;
    held = tensor.clone();
    described.op.changes.push_back(held);
  } else {
    held = without_graph(tensor);
  }
  described.op.outside.emplace_back(held, version_of(held));
  return held;
}

DeferredRecorder::Passing DeferredRecorder::describe(const OpPassing& passing) {
  Passing described;
  DeferredOp& op = described.op;
  op.op = passing.op;
  op.below = passing.below;
  op.default_dtype = c10::get_default_dtype();
  const OpInfo& info = op_info(passing.op);
  const auto arguments = passing.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool write = std::ranges::find(info.writes, i) != info.writes.end();
    op.arguments.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      return describe_tensor(tensor, write, described);
    }));
  }
  if (overwrites_first(info.name) && find(arguments[0].toTensor()) &&
      covers_storage(arguments[0].toTensor())) {
    const size_t storage = *find(arguments[0].toTensor());
    const auto itself = [&](const DeferredRange& range) { return range.storage == storage; };
    if (std::ranges::count_if(op.reads, itself) == 1) {
      std::erase_if(op.reads, itself);
      op.overwrites = {storage, 0, arguments[0].toTensor().storage().nbytes()};
    }
  }
  return described;
}

// Makes the operator's inputs resident, and records changes of their contents.
void DeferredRecorder::bring(const Passing& described) {
  const auto use = [&](size_t storage, bool values) {
    Tracked& tracked = tracked_[storage];
    tracked.used = count_;
    if (tracked.resident) {
      return false;
    }
    values ? log_->restore({storage}) : log_->allocate(storage);
    tracked.resident = true;
    resident_ += tracked.bytes;
    hash(storage, 0, static_cast<size_t>(tracked.bytes));
    return true;
  };
  if (described.op.overwrites) {
    use(described.op.overwrites->storage, false);
  }
  for (const DeferredRange& range : described.op.reads) {
    if (!use(range.storage, true)) {
      verify(range.storage, range.begin, range.end);
    }
  }
}

// New memory may already have the values that are written through a pointer next. Then no hash would
// show that they were written, and a replay would give other memory.
static void spoil(const at::Tensor& tensor) {
  c10::StorageImpl& memory = *tensor.storage().unsafeGetStorageImpl();
  auto* bytes = static_cast<char*>(memory.mutable_data());
  const size_t spoilt = memory.nbytes() <= kDeferredPiece ? kDeferredPiece : 64; // of each piece
  for (size_t begin = 0; begin < memory.nbytes(); begin += kDeferredPiece) {
    std::memset(bytes + begin, 0xA7, std::min(spoilt, memory.nbytes() - begin));
  }
}

void DeferredRecorder::note_results(const OpPassing& passing, Passing& described) {
  size_t number = 0;
  const std::string& name = op_info(passing.op).name;
  const bool empty = name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
  for (const c10::IValue& result : passing.results()) {
    visit_tensors(result, [&](const at::Tensor& tensor) {
      const auto is_alias = [&](const at::Tensor& other) { return same_storage(other, tensor); };
      if (is_deferrable(tensor) && !find(tensor) &&
          std::ranges::none_of(described.outside, is_alias)) {
        if (empty) {
          spoil(tensor);
        }
        const size_t storage = log_->add(tensor);
        known_[tensor.storage().unsafeGetStorageImpl()] = storage;
        tracked_.emplace_back().used = count_;
        hash(storage, 0, tensor.storage().nbytes());
        described.op.creates.emplace_back(number, storage);
      }
      ++number;
    });
  }
  for (const DeferredRange& range : described.op.writes) {
    hash(range.storage, range.begin, range.end);
  }
}

void DeferredRecorder::pass(const OpPassing& passing) {
  ++count_;
  Passing described = describe(passing);
  bring(described);
  make_room();
  GeneratorStates before = states_before(passing);
  passing.run();
  note_results(passing, described);
  if (!described.op.writes.empty() || !described.op.creates.empty()) {
    std::erase_if(before, [](const GeneratorState& then) { return then.same_as(then.again()); });
    described.op.generators = std::move(before);
    log_->append(std::move(described.op));
  }
  make_room();
}

void DeferredRecorder::evict(size_t storage) {
  Tracked& tracked = tracked_[storage];
  tracked.resident = false;
  resident_ -= tracked.bytes;
  if (const auto real = log_->find(storage)) {
    verify(storage, 0, real->nbytes());
    log_->evict(storage);
  }
}

void DeferredRecorder::make_room() {
  if (resident_ <= resident_bytes_) {
    return;
  }
  std::vector<std::pair<uint64_t, size_t>> order; // used, storage
  for (size_t s = 0; s < tracked_.size(); ++s) {
    if (tracked_[s].resident && log_->find(s) == nullptr) {
      tracked_[s].resident = false;
      resident_ -= tracked_[s].bytes;
    } else if (tracked_[s].resident && tracked_[s].used < count_) {
      order.emplace_back(tracked_[s].used, s);
    }
  }
  std::ranges::sort(order);
  for (const auto& [used, storage] : order) {
    if (resident_ <= resident_bytes_) {
      return;
    }
    evict(storage);
  }
}

void DeferredRecorder::finish(const torch::nn::Module& module) {
  scope_.reset();
  std::unordered_set<size_t> wanted;
  for (const at::Tensor& tensor : tensors_of(module)) {
    if (const auto storage = find(tensor)) {
      wanted.insert(*storage);
    }
  }
  std::vector<size_t> others;
  for (size_t s = 0; s < tracked_.size(); ++s) {
    if (wanted.count(s) == 0) {
      others.push_back(s);
    } else if (tracked_[s].resident) {
      evict(s);
    }
  }
  log_->restore(others);
  log_->prune();
}

std::shared_ptr<DeferredRecorder> record_deferred(const DeferredInitOptions& options) {
  if (options.resident_bytes < 0) {
    throw InputError("core::deferred_init",
                     "resident_bytes=" + std::to_string(options.resident_bytes), "0 or more");
  }
  return deferred_scope_open ? nullptr : std::make_shared<DeferredRecorder>(options);
}

void finish_deferred(DeferredRecorder* recorder, const torch::nn::Module* module) {
  if (module == nullptr) {
    throw InputError("core::deferred_init", "the function returned null", "a module");
  }
  if (recorder != nullptr) {
    recorder->finish(*module);
  }
}

// Groups tensors by log, so that inputs that several of them need are computed once.
static std::map<std::shared_ptr<DeferredLog>, std::vector<size_t>> places_of(
    const std::vector<at::Tensor>& tensors) {
  std::map<std::shared_ptr<DeferredLog>, std::vector<size_t>> places;
  for (const at::Tensor& tensor : tensors) {
    const DeferredPlace* place = deferred_place(tensor);
    if (place != nullptr && !place->log->open) {
      places[place->log].push_back(place->storage);
    }
  }
  return places;
}

void allocate_deferred(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts; // other tensors may share the rest of their storage
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) {
    if (is_deferred(tensor)) {
      (covers_storage(tensor) ? all : parts).push_back(tensor);
    }
  }
  materialize(parts);
  for (const auto& [log, storages] : places_of(all)) {
    for (const size_t storage : storages) {
      log->allocate(storage);
    }
    log->prune();
  }
}

} // namespace detail

bool is_deferred(const at::Tensor& tensor) { return detail::deferred_place(tensor) != nullptr; }

bool in_deferred_init() { return detail::deferred_scope_open; }

bool is_deferred(const torch::nn::Module& module) {
  const auto tensors = detail::tensors_of(module);
  return std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return is_deferred(tensor); });
}

void materialize(const std::vector<at::Tensor>& tensors) {
  for (const auto& [log, storages] : detail::places_of(tensors)) {
    log->restore(storages);
    log->prune();
  }
}

void materialize(const torch::nn::Module& module) { materialize(detail::tensors_of(module)); }

void materialize(const torch::nn::Module& module, const at::Device& device) {
  for (at::Tensor& tensor : detail::tensors_of(module)) {
    materialize({tensor});
    if (tensor.device() != device) {
      tensor.set_data(tensor.to(device)); // as Module::to() does
    }
  }
}

} // namespace hasten
