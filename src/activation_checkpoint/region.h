// One checkpointed region: what its forward left behind, and how it is run again.
//
// Note [Ownership]
// The hooks of saved tensors own the region; the region owns neither hooks nor
// graph, but the forward and the saved inputs. So a region dies with the last node
// that saved something in it, and there is no cycle.
//
// Note [Nested regions]
//   1. A saved tensor belongs to the innermost region.
//   2. The inputs of a region count as saved by the region around it: to unpack
//      them recomputes that one first, and so on outwards.
//   3. A recomputation begins as if no region were active; regions that it meets
//      on its way are regions of its own, and their recomputations need nothing
//      of the first forward.
#pragma once

#include <ATen/core/Tensor.h>
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
#include "hook_engine.h"
#include "op_replay.h"
#include "region_state.h"

namespace hasten::detail {

/// What is compared of a saved tensor.
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
  at::Tensor tensor{}; // only of parameters, which the graph keeps anyway
  c10::VariableVersion counter{};
  uint32_t version = 0;
  // Of parameters on the CPU: torch::optim writes through data(), which bumps no
  // version.
  uint64_t sample = 0;
  // A parameter that is a shard at one of the two times cannot be compared.
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;

  bool holds() const;
};

class Region final : public SavedHookFactory, public std::enable_shared_from_this<Region> {
 public:
  /// `parent`: the region around it, where that one's forward is not what is
  /// running (regions over several calls).
  explicit Region(ActivationCheckpointOptions options, const Region* parent = nullptr);

  const ActivationCheckpointOptions& options() const { return options_; }

  /// Saves inputs under the hooks that are active now.
  void save_inputs(const std::vector<at::Tensor>& inputs);
  /// Captures random state and autocast for `inputs`' devices.
  void save_state(const std::vector<at::Tensor>& inputs);
  /// What a recomputation runs; before any part of forward, since code inside the
  /// region may derive.
  void set_recompute(RegionForward forward) { forward_ = std::move(forward); }
  /// Runs a part of the forward: its saved tensors are this region's.
  std::vector<at::Tensor> run_forward(const RegionForward& part, std::vector<at::Tensor> inputs);
  std::vector<at::Tensor> run_forward(std::vector<at::Tensor> inputs) {
    return run_forward(forward_, std::move(inputs));
  }
  /// After the whole forward: looks for inputs changed in place and remembers the
  /// parameters that `outputs` depend on. `first_node` is at::sequence_number's
  /// at the beginning. Throws InputError.
  void finish_forward(const std::vector<at::Tensor>& outputs, uint64_t first_node);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  bool recomputes() const override { return true; }

  // For the hooks.

  /// A saved tensor's number; its shape is noted.
  size_t add_saved(const at::Tensor& tensor);
  void drop_saved(size_t index) { saved_[index].alive = false; }
  at::Tensor unpack(size_t index);
  /// Forgets what was recomputed for a backward.
  void forget(int64_t backward);

 private:
  friend class RecomputeHook;
  friend struct RecomputeFactory;
  struct Saved {
    explicit Saved(SavedShape shape_in) : shape(std::move(shape_in)) {}
    SavedShape shape;
    std::atomic<bool> alive{true};
  };
  // The tensors of one backward call.
  struct Recomputed {
    std::vector<at::Tensor> tensors{};
    size_t count = 0; // saved so far
    size_t left = 0; // not taken yet
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
  std::optional<RandomState> random_{};
  std::optional<AutocastState> autocast_{};
  OncePlace once_{};
  std::shared_ptr<OpStore> ops_{};
  bool complete_ = false; // forward has returned

  std::deque<Saved> saved_{}; // addresses stay
  std::mutex mutex_;
  std::map<int64_t, Recomputed> passes_{}; // by backward call
};

/// Which of early_stop's overrides is active on this thread.
std::optional<bool>& early_stop_override();

/// The guard of SharedRecompute that is active on this thread: 0 where none is.
struct SharedRegions {
  int64_t id = 0;
  std::mutex mutex;
  std::vector<std::weak_ptr<Region>> regions{};
};
std::shared_ptr<SharedRegions>& shared_regions();

void count_recompute(bool stopped_early);
/// Of this thread's recomputations, ever.
double& recompute_seconds();

} // namespace hasten::detail
