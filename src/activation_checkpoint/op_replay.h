// Keeping operators' results in forward and handing them out in recomputation; and
// the list of operators' names for messages.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hasten/activation_checkpoint/op_policy.h"
#include "hook_engine.h"
#include "region_state.h"
#include "write_guard.h"

namespace hasten::detail {

/// Ends a recomputation. Not a std::exception, so that code which catches those
/// lets it through.
struct StopRecompute {};

/// Where a recomputation may end.
///
/// Note [Where a recomputation ends]
/// Not in the hook that sees the last tensor: a custom function that is left while
/// it saves its own output keeps that output for ever, each owning the other. Nor
/// inside a backward that the region itself runs: the engine knows std::exceptions
/// alone. So the end is before the next operator's kernel, which is as early (what
/// an operator needs of its arguments is saved before it runs), or before a region
/// inside the region begins.
struct EarlyStop {
  int task = -1; // the backward call that the recomputation serves
  bool reached = false; // the last tensor is there

  /// Throws StopRecompute where that is so.
  void look() const;
};

/// A result that is kept.
///
/// Note [Results kept inside another region]
/// They are saved tensors of the region around, as the inner region's inputs are:
/// its forward keeps nothing, and its recomputation makes them again. Kept here
/// they would outlive the forward that the outer region exists to forget.
struct KeptCall {
  size_t index = 0; // which call of its operator
  size_t order = 0; // among all kept ones of the region
  /// Or, inside another region, what has them.
  std::vector<c10::IValue> results{};
  std::vector<std::unique_ptr<torch::autograd::SavedVariableHooks>> saved{};
  c10::VariableVersion counter{}; // of the first result
  std::optional<CpuRandomState> random_after{};
  // In-place operators that the value has gone through, and the version after.
  int absorbed = 0;
  uint32_t version = 0;
  bool taken = false; // handed out, and the graph was not retained
};

/// What a region's forward left of its operators.
struct OpStore {
  struct Calls {
    size_t count = 0;
    std::vector<KeptCall> kept{}; // by rising index
  };
  std::unordered_map<const c10::FunctionSchema*, Calls> calls{};
  std::vector<std::string> names{}; // all, in order; of debug alone
  size_t kept = 0; // ever
  size_t needed = 0; // of these, before the last tensor that was saved

  /// Drops what a recomputation that stops early does not reach: the product that
  /// ends a block is seldom needed again.
  void drop_unreached();
};

/// In forward: runs operators, and keeps what the policy says.
///
/// A kept value that is changed in place is still right where the change follows at
/// once, views aside: linear() of 3-d inputs is a product and an addition to its
/// result. Then the value holds both, and recomputation skips both. Any other change
/// inside the region means that the call is not kept after all; one after the region
/// is found by the version counter.
class OpRecorder final : public OpObserver {
 public:
  /// `policy` may be null; `names`: remember them; `around`: who saves results in
  /// place of `store`, or null.
  OpRecorder(std::shared_ptr<const OpPolicy> policy, std::shared_ptr<OpStore> store, bool names,
             SavedHookFactory* around);
  ~OpRecorder() override { seal(); }
  void pass(const OpPassing& passing) override;
  WriteGuard* writes() const { return writes_; }

 private:
  struct Held { // a kept call, by the storage of its first result, not owned
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const c10::FunctionSchema* op;
    size_t index;
    int64_t numel;
  };
  KeptCall* kept(const Held& held);
  void run(const OpPassing& passing);
  void watch(const OpPassing& passing, const OpInfo& info, bool own);
  void seal();
  void keep(const OpPassing& passing, const OpInfo& info, size_t index);

  std::shared_ptr<const OpPolicy> policy_;
  std::shared_ptr<OpStore> store_;
  bool names_;
  SavedHookFactory* around_;
  OpRecorder* outer_ = nullptr; // of a region around this one
  WriteGuard* writes_ = nullptr; // of a recomputation around this one
  std::vector<Held> held_{};
  bool open_ = false; // the last of held_ may absorb
};

/// In recomputation: hands out what was kept, runs the rest, and writes nothing
/// outside.
class OpReplayer final : public OpObserver {
 public:
  /// `store` may be null; `keeps_graph`: results are wanted again later; `stop`:
  /// looked at before each operator.
  OpReplayer(std::shared_ptr<OpStore> store, bool keeps_graph, const EarlyStop* stop = nullptr);
  void pass(const OpPassing& passing) override;
  WriteGuard* writes() { return &writes_; }
  /// "operator 12 is aten::relu, in forward it was aten::sigmoid"; empty where
  /// names were not remembered or are the same so far.
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
