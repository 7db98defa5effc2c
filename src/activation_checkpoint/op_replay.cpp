#include "op_replay.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "hasten/activation_checkpoint/activation_checkpoint.h"

namespace hasten::detail {

static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

static at::Tensor written_tensor(const OpPassing& passing, size_t argument) {
  const size_t first = passing.stack.size() - passing.arguments();
  const c10::IValue& value = passing.stack[first + argument];
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

// A tensor with the same memory and version counter, but without the graph that the original is
// about to join.
static c10::IValue bare_value(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    return value.toTensor().tensor_data();
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> list = value.toTensorVector();
    for (at::Tensor& tensor : list) {
      tensor = tensor.defined() ? tensor.tensor_data() : tensor;
    }
    return list;
  }
  return value;
}

void OpStore::drop_unreached() {
  for (auto& [op, of_op] : calls) {
    std::erase_if(of_op.kept, [this](const KeptCall& call) { return call.order >= needed; });
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

KeptCall* OpRecorder::kept(const Held& held) {
  auto& calls = store_->calls[held.op].kept;
  const auto it = std::find_if(calls.begin(), calls.end(),
                               [&](const KeptCall& call) { return call.index == held.index; });
  return it == calls.end() ? nullptr : &*it;
}

// From here on the kept value absorbs no more changes, so its version is final.
void OpRecorder::seal() {
  if (open_) {
    KeptCall* call = kept(held_.back());
    call->version = call->counter.current_version();
    open_ = false;
  }
}

void OpRecorder::run(const OpPassing& passing) {
  if (writes_ != nullptr) {
    writes_->pass(passing, [&] { passing.run(); });
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
      ++kept(*held)->absorbed;
      return;
    }
    seal();
    auto& calls = store_->calls[held->op].kept;
    calls.erase(calls.begin() + (kept(*held) - calls.data()));
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
  const size_t index = store_->calls[&passing.op.schema()].count++;
  run(passing);
  keep(passing, info, index);
}

void OpRecorder::keep(const OpPassing& passing, const OpInfo& info, size_t index) {
  const size_t count = passing.op.schema().returns().size();
  if (!info.fresh || !info.writes.empty() || count == 0) {
    return; // a view costs nothing, and an in-place operator has no result to keep
  }
  const size_t first = passing.stack.size() - count;
  if (!passing.stack[first].isTensor()) {
    return;
  }
  OpCall call{info.name, static_cast<int64_t>(index), 0};
  for (size_t i = first; i < passing.stack.size(); ++i) {
    visit_tensors(passing.stack[i], [&](const at::Tensor& tensor) {
      call.bytes += static_cast<int64_t>(tensor.nbytes());
    });
  }
  if (!info.collective && !policy_->keeps(call)) {
    return;
  }
  const at::Tensor& result = passing.stack[first].toTensor();
  if (!result.defined() || storage_of(result) == nullptr) {
    return;
  }
  KeptCall kept;
  kept.index = index;
  kept.order = store_->kept++;
  kept.counter = result.unsafeGetTensorImpl()->version_counter();
  const bool saves =
      around_ != nullptr && std::all_of(passing.stack.begin() + static_cast<int64_t>(first),
                                        passing.stack.end(), [](const c10::IValue& value) {
                                          return value.isTensor() && value.toTensor().defined();
                                        });
  for (size_t i = first; i < passing.stack.size(); ++i) {
    c10::IValue value = bare_value(passing.stack[i]);
    if (saves) {
      kept.saved.push_back(around_->make_hooks());
      kept.saved.back()->call_pack_hook(value.toTensor());
    } else {
      kept.results.push_back(std::move(value));
    }
  }
  if (info.random) {
    kept.random_after = CpuRandomState::now();
  }
  held_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(result.storage().getWeakStorageImpl()),
                   &passing.op.schema(), index, result.numel()});
  store_->calls[&passing.op.schema()].kept.push_back(std::move(kept));
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
  writes_.pass(passing, [&] { passing.run(); });
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
      torch::jit::drop(passing.stack, passing.arguments());
      if (returns) {
        passing.stack.emplace_back(target);
      }
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
  auto& kept = calls->second.kept;
  const auto call = std::find_if(kept.begin(), kept.end(), [&](const KeptCall& candidate) {
    return candidate.index == index;
  });
  if (call == kept.end()) {
    return false;
  }
  if (call->taken) {
    throw CheckpointError("activation_checkpoint::recompute",
                          "a second backward needs the kept result of " + info.name,
                          "retain_graph=true in the previous backward",
                          "retain the graph in every backward but the last");
  }
  for (const auto& hooks : call->saved) {
    call->results.emplace_back(hooks->call_unpack_hook());
  }
  const at::Tensor first = call->results[0].toTensor();
  if (first._version() != call->version) {
    throw CheckpointError(
        "activation_checkpoint::recompute",
        "the kept result of " + info.name + " was changed in place after its region",
        "unchanged kept results",
        "clone the region's output before changing it, or keep other operators");
  }
  torch::jit::drop(passing.stack, passing.arguments());
  for (c10::IValue& result : call->results) {
    passing.stack.push_back(keeps_graph_ ? bare_value(result) : std::move(result));
  }
  replayed_.push_back({storage_of(first), call->absorbed});
  if (!keeps_graph_ || !call->saved.empty()) {
    call->results.clear();
  }
  if (!keeps_graph_) {
    call->saved.clear();
    call->taken = true;
  }
  if (call->random_after) {
    call->random_after->restore();
  }
  return true;
}

std::string OpReplayer::difference() const {
  if (!store_ || store_->names.empty()) {
    return {};
  }
  const size_t common = std::min(names_.size(), store_->names.size());
  for (size_t i = 0; i < common; ++i) {
    if (names_[i] != store_->names[i]) {
      return "operator " + std::to_string(i) + " is " + names_[i] + ", in forward it was " +
             store_->names[i];
    }
  }
  if (names_.size() > store_->names.size()) {
    return "operator " + std::to_string(common) + " is " + names_[common] +
           ", in forward there was none";
  }
  return {};
}

} // namespace hasten::detail
