#include "op_replay.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "hasten/activation_checkpoint/activation_checkpoint.h"

namespace hasten::detail {

static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

static at::Tensor written_tensor(const OpPassing& passing, size_t argument) {
  const c10::IValue& value = passing.arguments()[argument];
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// Tensors with the same memory and version counter, but without the graph that the originals are
// about to join.
static c10::IValue bare_value(const c10::IValue& value) {
  return map_tensors(value, [](const at::Tensor& tensor) { return tensor.tensor_data(); });
}

WriteGuard::~WriteGuard() {
  for (auto& [counter, version] : versions_) {
    counter.set_version(version);
  }
}

bool WriteGuard::outside(const at::Tensor& tensor) const {
  const auto* storage = storage_of(tensor);
  return storage != nullptr && std::find(made_.begin(), made_.end(), storage) == made_.end();
}

// Copies replace the tensors in the arguments, and the tensors replace the copies in the results.
void WriteGuard::pass(const OpPassing& passing) {
  const OpInfo& info = op_info(passing.op);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies; // copy, tensor
  for (const size_t argument : info.writes) {
    c10::IValue& value = passing.arguments()[argument];
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      if (!outside(tensor)) {
        return tensor;
      }
      if (!tensor.is_inference()) {
        const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
        versions_.push_back({counter, counter.current_version()});
      }
      return copies.emplace_back(tensor.clone(), tensor).first;
    });
  }
  passing.run();
  for (c10::IValue& result : passing.results()) {
    for (const auto& [copy, tensor] : copies) {
      if (result.isTensor() && result.toTensor().is_same(copy)) {
        result = tensor;
        break;
      }
    }
    if (info.fresh) { // a view of an existing tensor does not make it the guard's own
      visit_tensors(result, [&](const at::Tensor& tensor) { made_.push_back(storage_of(tensor)); });
    }
  }
}

void OpStore::drop_unreached() {
  for (auto& [op, of_op] : calls) {
    std::erase_if(of_op.kept, [this](const auto& call) { return call.second.order >= needed; });
  }
}

OpRecorder::OpRecorder(std::shared_ptr<const OpPolicy> policy, std::shared_ptr<OpStore> store,
                       bool names, SavedHookFactory* around)
    : policy_(std::move(policy)), store_(std::move(store)), names_(names), around_(around) {
  OpObserver* observer = current_op_observer();
  if ((outer_ = dynamic_cast<OpRecorder*>(observer)) != nullptr) {
    writes_ = outer_->writes_;
  } else if (auto* replayer = dynamic_cast<OpReplayer*>(observer)) {
    writes_ = replayer->writes();
  }
}

// From here on the kept value absorbs no more changes, so its version is final.
void OpRecorder::seal() {
  if (open_) {
    KeptCall& call = held_.back().calls->kept.at(held_.back().index);
    call.version = call.counter.current_version();
    open_ = false;
  }
}

void OpRecorder::run(const OpPassing& passing) {
  if (writes_ != nullptr) {
    writes_->pass(passing);
  } else {
    passing.run();
  }
}

// Called before an operator runs. `own`: the operator belongs to this region, so a recomputation
// can skip it.
void OpRecorder::watch(const OpPassing& passing, const OpInfo& info, bool own) {
  for (const size_t argument : info.writes) {
    const at::Tensor target = written_tensor(passing, argument);
    const auto* storage = storage_of(target);
    const auto held = std::find_if(held_.begin(), held_.end(), [&](const Held& candidate) {
      return candidate.storage._unsafe_get_target() == storage;
    });
    if (storage == nullptr || held == held_.end()) {
      continue;
    }
    if (own && open_ && held + 1 == held_.end() && info.writes.size() == 1 &&
        held->numel == target.numel()) {
      ++held->calls->kept.at(held->index).absorbed;
      return;
    }
    seal();
    held->calls->kept.erase(held->index);
    held_.erase(held);
  }
  if (info.fresh) {
    seal();
  }
}

void OpRecorder::pass(const OpPassing& passing) {
  const OpInfo& info = op_info(passing.op);
  if (info.ignored) {
    run(passing);
    return;
  }
  if (names_) {
    store_->names.push_back(info.name);
  }
  for (OpRecorder* outer = outer_; outer != nullptr; outer = outer->outer_) {
    outer->watch(passing, info, false);
  }
  if (!policy_) {
    run(passing);
    return;
  }
  if (info.collective && !info.fresh) {
    throw InputError("activation_checkpoint::policy",
                     "collective " + info.name + " changes its tensors in place in a region",
                     "a collective that returns a new tensor", "call it in hasten::run_once()");
  }
  watch(passing, info, true);
  OpStore::Calls& calls = store_->calls[&passing.op.schema()];
  const size_t index = calls.count++;
  run(passing);
  keep(passing, info, calls, index);
}

void OpRecorder::keep(const OpPassing& passing, const OpInfo& info, OpStore::Calls& calls,
                      size_t index) {
  const auto results = passing.results();
  if (!info.fresh || !info.writes.empty() || results.empty() || !results[0].isTensor()) {
    return; // a view costs nothing, and an in-place operator has no result to keep
  }
  if (!info.collective &&
      !policy_->keeps({info.name, static_cast<int64_t>(index), result_bytes(passing)})) {
    return;
  }
  const at::Tensor& result = results[0].toTensor();
  if (storage_of(result) == nullptr) {
    return;
  }
  KeptCall& kept = calls.kept[index];
  kept.order = store_->kept++;
  kept.counter = result.unsafeGetTensorImpl()->version_counter();
  const bool saves = around_ != nullptr &&
                     std::all_of(results.begin(), results.end(), [](const c10::IValue& value) {
                       return value.isTensor() && value.toTensor().defined();
                     });
  for (const c10::IValue& value : results) {
    if (saves) {
      kept.saved.push_back(around_->make_hooks());
      kept.saved.back()->call_pack_hook(bare_value(value).toTensor());
    } else {
      kept.results.push_back(bare_value(value));
    }
  }
  if (info.random && !result.is_meta()) {
    kept.random_after = GeneratorState(result.device());
  }
  held_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(result.storage().getWeakStorageImpl()),
                   &calls, index, result.numel()});
  open_ = true;
}

void EarlyStop::look() const {
  if (reached && torch::autograd::get_current_graph_task_id() == task) {
    throw StopRecompute{};
  }
}

OpReplayer::OpReplayer(std::shared_ptr<OpStore> store, bool keeps_graph, const EarlyStop* stop)
    : store_(std::move(store)), keeps_graph_(keeps_graph), stop_(stop) {}

void OpReplayer::pass(const OpPassing& passing) {
  if (stop_ != nullptr) {
    stop_->look();
  }
  const OpInfo& info = op_info(passing.op);
  if (store_ && !info.ignored) {
    if (!store_->names.empty()) {
      names_.push_back(info.name);
    }
    if (!store_->calls.empty() && (skip_write(passing, info) || hand_out(passing, info))) {
      return;
    }
  }
  writes_.pass(passing);
}

// Skips an in-place operator whose effect the kept value already has.
bool OpReplayer::skip_write(const OpPassing& passing, const OpInfo& info) {
  if (info.writes.size() != 1 || replayed_.empty()) {
    return false;
  }
  const at::Tensor target = written_tensor(passing, info.writes[0]);
  const auto* storage = storage_of(target);
  for (Replayed& replayed : replayed_) {
    if (replayed.storage == storage && replayed.absorbed > 0) {
      --replayed.absorbed;
      ++next_[&passing.op.schema()];
      const bool returns = !passing.op.schema().returns().empty();
      passing.answer(returns ? std::vector<c10::IValue>{target} : std::vector<c10::IValue>{});
      return true;
    }
  }
  return false;
}

bool OpReplayer::hand_out(const OpPassing& passing, const OpInfo& info) {
  const auto calls = store_->calls.find(&passing.op.schema());
  const size_t index = next_[&passing.op.schema()]++;
  if (calls == store_->calls.end() || index >= calls->second.count) {
    throw CheckpointError(
        "activation_checkpoint::recompute",
        "the recomputation calls " + info.name + " for the " + std::to_string(index + 1) +
            ". time, but forward called it " +
            std::to_string(calls == store_->calls.end() ? 0 : calls->second.count) + " times",
        "the same operators in both", "make the region depend only on its inputs");
  }
  const auto kept = calls->second.kept.find(index);
  if (kept == calls->second.kept.end()) {
    return false;
  }
  KeptCall& call = kept->second;
  if (call.taken) {
    throw CheckpointError("activation_checkpoint::recompute",
                          "a second backward needs the kept result of " + info.name,
                          "retain_graph=true in the previous backward",
                          "retain the graph in every backward but the last");
  }
  std::vector<c10::IValue>& results = call.results;
  for (const auto& hooks : call.saved) {
    results.emplace_back(hooks->call_unpack_hook());
  }
  const at::Tensor first = results[0].toTensor();
  if (first._version() != call.version) {
    throw CheckpointError(
        "activation_checkpoint::recompute",
        "the kept result of " + info.name + " was changed in place after its region",
        "unchanged kept results",
        "clone the region's output before changing it, or keep other operators");
  }
  std::vector<c10::IValue> given = keeps_graph_ ? results : std::move(results);
  if (keeps_graph_) {
    std::transform(given.begin(), given.end(), given.begin(), &bare_value);
  }
  passing.answer(std::move(given));
  replayed_.push_back({storage_of(first), call.absorbed});
  if (!keeps_graph_ || !call.saved.empty()) {
    results.clear();
  }
  if (!keeps_graph_) {
    call.saved.clear();
    call.taken = true;
  }
  if (call.random_after) {
    call.random_after->restore();
  }
  return true;
}

std::string OpReplayer::difference() const {
  if (!store_) {
    return {};
  }
  const std::vector<std::string>& forward = store_->names;
  const auto [mine, theirs] =
      std::mismatch(names_.begin(), names_.end(), forward.begin(), forward.end());
  if (mine == names_.end()) {
    return {};
  }
  return "operator " + std::to_string(mine - names_.begin()) + " is " + *mine + ", in forward " +
         (theirs == forward.end() ? "there was none" : "it was " + *theirs);
}

} // namespace hasten::detail
