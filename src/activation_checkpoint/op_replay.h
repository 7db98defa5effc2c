// Keeps operators' results in forward and returns them in recomputations. Keeps recomputations from
// writing to existing tensors. Also records operators' names for messages.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hasten/activation_checkpoint/op_policy.h"
#include "hasten/core/device.h"
#include "hasten/core/op_scope.h"
#include "hook_engine.h"

namespace hasten::detail {

/// In a recomputation: prevents writes to tensors that existed before. An operator that would
/// change such a tensor changes a copy, and its result is the tensor.
class WriteGuard {
 public:
  WriteGuard() = default;
  WriteGuard(const WriteGuard&) = delete;
  WriteGuard& operator=(const WriteGuard&) = delete;
  /// Restores version counters, because nothing was changed.
  ~WriteGuard();
  void pass(const OpPassing& passing);

 private:
  struct Version {
    c10::VariableVersion counter;
    uint32_t version;
  };
  bool outside(const at::Tensor& tensor) const;

  std::vector<const c10::StorageImpl*> made_{};
  std::vector<Version> versions_{};
};

/// Ends a recomputation. Not derived from std::exception, so that code which catches those does not
/// catch it.
struct StopRecompute {};

/// Where a recomputation may stop.
///
/// Note [Where a recomputation ends]
/// It cannot stop in the hook that gets the last tensor: a custom function that throws while it
/// saves its own output keeps that output forever, because each owns the other. It cannot stop
/// inside a backward that the region itself runs, because the engine only handles std::exception.
/// So it stops before the next operator's kernel, or before a nested region begins. That is as
/// early, because an operator saves its arguments before it runs.
struct EarlyStop {
  int task = -1; // the backward call that the recomputation serves
  bool reached = false; // the last tensor was saved

  /// Throws StopRecompute if reached in that backward call.
  void look() const;
};

/// A kept result.
///
/// Note [Results kept inside another region]
/// They are saved tensors of the outer region, as the inner region's inputs are: the outer forward
/// keeps nothing, and its recomputation makes them again. If the inner region kept them, they would
/// stay in memory although the outer region exists to avoid that.
struct KeptCall {
  size_t order = 0; // index among all kept calls of the region
  /// `saved` replaces `results` inside another region.
  std::vector<c10::IValue> results{};
  std::vector<std::unique_ptr<torch::autograd::SavedVariableHooks>> saved{};
  c10::VariableVersion counter{}; // of the first result
  std::optional<GeneratorState> random_after{};
  // In-place operators that the value includes, and the version after them.
  int absorbed = 0;
  uint32_t version = 0;
  bool taken = false; // returned already, and the graph was not retained
};

/// The operators of a region's forward.
struct OpStore {
  struct Calls {
    size_t count = 0;
    std::map<size_t, KeptCall> kept{}; // by index among the calls of the operator
  };
  std::unordered_map<const c10::FunctionSchema*, Calls> calls{};
  std::vector<std::string> names{}; // all names, in order; only with debug
  size_t kept = 0; // number of kept calls so far
  size_t needed = 0; // those before the last saved tensor

  /// Drops results that a recomputation with early stop does not reach. The product at the end of a
  /// block is rarely needed again.
  void drop_unreached();
};

/// In forward: runs operators and keeps the results that the policy selects.
///
/// A kept value that is changed in place stays valid if the change is the next operator that is no
/// view: linear() of 3-d inputs is a product and an in-place addition. Then the value includes
/// both, and recomputation skips both. After any other change inside the region the call is not
/// kept. The version counter shows a change after the region.
class OpRecorder final : public OpObserver {
 public:
  /// `policy` may be null. `names`: record names. `around`: saves results instead of `store`; may
  /// be null.
  OpRecorder(std::shared_ptr<const OpPolicy> policy, std::shared_ptr<OpStore> store, bool names,
             SavedHookFactory* around);
  ~OpRecorder() override { seal(); }
  void pass(const OpPassing& passing) override;

 private:
  struct Held { // a kept call, identified by the storage of its first result (weak)
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    OpStore::Calls* calls;
    size_t index;
    int64_t numel;
  };
  void run(const OpPassing& passing);
  void watch(const OpPassing& passing, const OpInfo& info, bool own);
  void seal();
  void keep(const OpPassing& passing, const OpInfo& info, OpStore::Calls& calls, size_t index);

  std::shared_ptr<const OpPolicy> policy_;
  std::shared_ptr<OpStore> store_;
  bool names_;
  SavedHookFactory* around_;
  OpRecorder* outer_ = nullptr; // recorder of the region around this one
  WriteGuard* writes_ = nullptr; // guard of the recomputation around this one
  std::vector<Held> held_{};
  bool open_ = false; // the last of held_ may still absorb changes
};

/// In recomputation: returns kept results, runs the other operators, and does not write to existing
/// tensors.
class OpReplayer final : public OpObserver {
 public:
  /// `keeps_graph`: results are needed again later. `stop` is checked before each operator.
  explicit OpReplayer(std::shared_ptr<OpStore> store = nullptr, bool keeps_graph = false,
                      const EarlyStop* stop = nullptr);
  void pass(const OpPassing& passing) override;
  WriteGuard* writes() { return &writes_; }
  /// "operator 12 is aten::relu, in forward it was aten::sigmoid". Empty if names were not recorded
  /// or are equal so far.
  std::string difference() const;

 private:
  bool hand_out(const OpPassing& passing, const OpInfo& info);
  bool skip_write(const OpPassing& passing, const OpInfo& info);

  struct Replayed {
    const c10::StorageImpl* storage;
    int absorbed;
  };
  std::shared_ptr<OpStore> store_;
  bool keeps_graph_;
  const EarlyStop* stop_;
  WriteGuard writes_{};
  std::unordered_map<const c10::FunctionSchema*, size_t> next_{};
  std::vector<Replayed> replayed_{};
  std::vector<std::string> names_{};
};

} // namespace hasten::detail
