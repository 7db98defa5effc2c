// One checkpointed region: the data of its forward, and its recomputation.
//
// Note [Ownership]
// The hooks of saved tensors own the region. The region owns the forward and the saved inputs, but
// neither hooks nor graph. So a region dies with the last node that saved a tensor in it, and there
// is no cycle.
//
// Note [Nested regions]
//   1. A saved tensor belongs to the innermost region.
//   2. The inputs of a region count as saved by the region around it. To unpack them recomputes
//      the outer region first, and so on outwards.
//   3. A recomputation begins as if no region were active. Regions inside it are new regions, and
//      their recomputations need nothing of the first forward.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/core/autocast.h"
#include "hasten/core/device.h"
#include "hasten/core/recompute.h"
#include "hook_engine.h"
#include "op_replay.h"

namespace hasten::detail {

/// The compared properties of a saved tensor.
struct SavedShape {
  at::DimVector sizes{};
  at::ScalarType dtype = at::kFloat;
  at::Device device{at::kCPU};

  static SavedShape of(const at::Tensor& tensor);
  bool operator==(const SavedShape& other) const = default;
  std::string text() const;
};

/// A tensor that must not change in place between forward and recomputation.
struct Unchanged {
  at::Tensor tensor{}; // only for parameters, which the graph keeps anyway
  c10::VariableVersion counter{};
  uint32_t version = 0;
  // Only for parameters on the CPU: torch::optim writes through data(), which does not change the
  // version.
  uint64_t sample = 0;
  // A parameter that is a shard at one of the two times is not compared.
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;

  /// Of a tensor without a version: true.
  bool holds() const;
};

/// What a forward depends on in addition to its inputs, and what a recomputation restores.
struct ForwardState {
  GeneratorStates random{}; // empty without ActivationCheckpointOptions::preserve_rng_state
  AutocastState autocast{};

  static ForwardState now(const std::vector<at::Tensor>& inputs, bool preserve_rng_state);
  void restore() const;
};

/// While it lives, this thread recomputes a forward that had this state and place.
class RecomputeScope {
 public:
  RecomputeScope(const ForwardState& forward, const OncePlace& once);
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
  ~RecomputeScope();

 private:
  void drop_casts() const;

  GeneratorScope random_;
  AutocastState autocast_before_;
  bool casts_;
  OnceScope once_;
  at::AutoGradMode grad_mode_{true};
};

class Region final : public SavedHookFactory, public std::enable_shared_from_this<Region> {
 public:
  /// `parent`: the region around it, if its forward is not running now (regions over several
  /// calls).
  explicit Region(ActivationCheckpointOptions options, const Region* parent = nullptr);

  const ActivationCheckpointOptions& options() const { return options_; }

  /// Saves inputs under the currently active hooks.
  void save_inputs(const std::vector<at::Tensor>& inputs);
  /// Records random state and autocast for the devices of `inputs`.
  void save_state(const std::vector<at::Tensor>& inputs) {
    state_ = ForwardState::now(inputs, options_.preserve_rng_state);
  }
  /// Sets what a recomputation runs. Call it before any part of forward, because code inside the
  /// region may run backward.
  void set_recompute(RegionForward forward) { forward_ = std::move(forward); }
  /// Runs a part of forward. Tensors that it saves belong to this region.
  std::vector<at::Tensor> run_forward(const RegionForward& part, std::vector<at::Tensor> inputs);
  std::vector<at::Tensor> run_forward(std::vector<at::Tensor> inputs) {
    return run_forward(forward_, std::move(inputs));
  }
  /// Call it after the whole forward. Records the parameters that `outputs` depend on. `first_node`
  /// is at::sequence_number's value at the beginning. Throws InputError if an input was changed in
  /// place.
  void finish_forward(const std::vector<at::Tensor>& outputs, uint64_t first_node);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  bool recomputes() const override { return true; }

  // Called by the hooks.

  /// Records a saved tensor's shape and returns its index.
  size_t add_saved(const at::Tensor& tensor);
  void drop_saved(size_t index) { saved_[index].alive = false; }
  at::Tensor unpack(size_t index);
  /// Frees what was recomputed for a backward.
  void forget(int64_t backward);

 private:
  class RecomputeHook;
  class RecomputeFactory;
  struct Saved {
    explicit Saved(SavedShape shape_in) : shape(std::move(shape_in)) {}
    SavedShape shape;
    std::atomic<bool> alive{true};
  };
  // The tensors of one backward call.
  struct Recomputed {
    std::vector<at::Tensor> tensors{};
    size_t count = 0; // tensors saved so far
    size_t left = 0; // tensors that were not unpacked yet
    EarlyStop stop{};
  };

  void recompute(Recomputed& pass, bool keeps_graph);
  void run_again(Recomputed& pass, bool keeps_graph);
  void require_unchanged() const;
  void resave(Recomputed& pass, const at::Tensor& tensor);
  [[noreturn]] void fail(const std::string& what, const std::string& fix) const;
  std::string label() const;

  const ActivationCheckpointOptions options_;
  RegionForward forward_{};
  std::vector<torch::autograd::SavedVariable> inputs_{};
  std::vector<Unchanged> input_versions_{};
  std::vector<Unchanged> parameters_{};
  ForwardState state_{};
  OncePlace once_{};
  std::shared_ptr<OpStore> ops_{};
  bool complete_ = false; // forward has returned

  std::deque<Saved> saved_{}; // a deque, because addresses must stay
  std::mutex mutex_;
  std::map<int64_t, Recomputed> passes_{}; // by backward call
};

/// Runs forward(inputs) as a reentrant checkpoint. Logs a warning once per process.
std::vector<at::Tensor> run_reentrant(RegionForward forward, std::vector<at::Tensor> inputs,
                                      const ActivationCheckpointOptions& options);

/// The active EarlyStopGuard's value on this thread.
std::optional<bool>& early_stop_override();

/// The SharedRecompute guard that is active on this thread, or null.
struct SharedRegions {
  int64_t id = 0;
  std::mutex mutex;
  std::vector<std::weak_ptr<Region>> regions{};
};
std::shared_ptr<SharedRegions>& shared_regions();

void count_recompute(bool stopped_early);
void count_recompute_time(double seconds);

} // namespace hasten::detail
