// Decides what to recompute under a memory budget. It measures the model's blocks in one step,
// makes a plan, runs a step, and plans again if the observed peak is above the budget.
//
//   auto profile = hasten::profile_activations(model, loss);
//   auto plan = hasten::plan_activations(profile, budget_bytes);
//   hasten::gradient_checkpointing_enable(model, {.plan = plan});
//
// hasten::enable_within_budget does all of this and checks the peak.
//
// A plan has nested regions of consecutive blocks. Given the measured sizes and times, it is the
// fastest such plan: the persistent plans of Beaumont et al., arXiv 1911.13214, with early stop and
// operator policies per block added. The general problem is NP-hard. Time O(slots * blocks^3), 500
// to 4000 slots.
// The budget is for activations: the memory that one forward and backward allocate, without
// parameters, their gradients and optimizer state. Libraries' scratch memory is not included.
// Threading: values are immutable after construction; functions are local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "hasten/config/checkpoint_spec.h"

namespace torch::nn {
class Module;
}

namespace hasten {

/// Measured seconds and bytes of one block. Bytes are above those before the block. Each storage
/// counts once; parameters and the block's input do not count.
struct BlockProfile {
  std::string name{};
  double forward_seconds = 0;
  double backward_seconds = 0;
  /// Recomputation from the input to the last tensor that backward needs.
  double recompute_seconds = 0;
  /// Bytes of the output.
  int64_t output_bytes = 0;
  /// Bytes kept for backward, with the output.
  int64_t saved_bytes = 0;
  /// Peak of forward minus saved_bytes.
  int64_t forward_extra = 0;
  /// Peak of a forward that keeps nothing, with the output.
  int64_t dropped_peak = 0;
  /// Peak of backward minus saved_bytes and the gradient of the output.
  int64_t backward_extra = 0;
  /// Peak of a recomputation and the backward after it, with the gradient of the output, but
  /// without the output, which a recomputation with early stop does not make. If 0: output_bytes +
  /// saved_bytes + backward_extra.
  int64_t recompute_peak = 0;
  /// With expensive operators' results kept: bytes kept for backward, peak of backward minus those
  /// and the gradient of the output, and recomputation time.
  int64_t ops_saved_bytes = 0;
  int64_t ops_backward_extra = 0;
  double ops_recompute_seconds = 0;
  /// Whether forward draws random numbers.
  bool random = false;
};

struct ChainProfile {
  std::vector<BlockProfile> blocks{};
  /// Hash of the blocks' names and of the shapes of their parameters and inputs.
  std::string shapes_hash{};
  /// Bytes in use when the first block begins: its input, and what was allocated before it.
  int64_t before_bytes = 0;
  /// Peak from the end of the last block until its output has a gradient.
  int64_t after_bytes = 0;
  /// Part of after_bytes that stays until the end (loss, logits).
  int64_t after_left_bytes = 0;
  /// Peak in the backward of what precedes the first block. A budget cannot be below it.
  int64_t first_peak_bytes = 0;
  /// Time outside the blocks.
  double other_seconds = 0;
};

enum class BlockChoice {
  /// Keeps everything that backward needs.
  keep,
  /// Keeps the results of expensive operators.
  keep_ops,
};

/// Blocks [first, last) are one region. Two regions are nested or disjoint.
struct PlanRegion {
  int64_t first = 0;
  int64_t last = 0;
  /// keep_ops is only valid for regions of one block.
  BlockChoice choice = BlockChoice::keep;

  bool operator==(const PlanRegion&) const = default;
};

class ActivationPlan {
 public:
  std::vector<std::string> blocks{};
  /// Sorted by `first`, outer regions before inner ones. Blocks outside all regions are kept.
  std::vector<PlanRegion> regions{};
  std::string shapes_hash{};
  int64_t budget_bytes = 0;
  /// Predicted for one forward and backward; the peak counts as for a budget.
  int64_t predicted_peak_bytes = 0;
  double predicted_seconds = 0;
  /// Observed peak; 0 until a step was run with this plan.
  int64_t observed_peak_bytes = 0;

  nlohmann::json to_json() const;
  /// Throws InputError with `source` and the error, for example a missing key or regions that
  /// overlap.
  static ActivationPlan from_json(const nlohmann::json& json, const std::string& source = "plan");
  /// Throws InputError if the plan was made for other shapes.
  void require_shapes(const ChainProfile& profile) const;
};

/// Measures each block separately inside one call of `loss`. `loss` runs the model's forward and
/// returns a scalar; profile_activations() calls its backward. A block runs at least ten times, and
/// its shortest time counts. Blocks of equal shapes are measured once. Nothing is kept between blocks,
/// so this fits in memory even if training does not. Restores random state, buffers and gradients.
/// Installs the memory meter (core/memory.h).
/// Call it before prepare(), because hooks on parameters would see the measurement. Throws
/// InputError if no block is called.
ChainProfile profile_activations(const std::shared_ptr<torch::nn::Module>& model,
                                 const std::function<at::Tensor()>& loss);

/// Returns the fastest plan within `budget_bytes`. Throws InputError with the smallest possible
/// budget.
std::shared_ptr<const ActivationPlan> plan_activations(const ChainProfile& profile,
                                                       int64_t budget_bytes);
/// The same, but each block is either kept or recomputed as a whole.
std::shared_ptr<const ActivationPlan> plan_whole_blocks(const ChainProfile& profile,
                                                        int64_t budget_bytes);

/// Peak and time of a plan for a profile, from a simulation of the step.
struct PlanCost {
  int64_t peak_bytes = 0;
  double seconds = 0;
};
PlanCost plan_cost(const ChainProfile& profile, const std::vector<PlanRegion>& regions);

/// Simple plans for comparison: no region; each block; ceil(sqrt(n)) regions.
std::vector<PlanRegion> keep_all_regions(int64_t blocks);
std::vector<PlanRegion> each_block_regions(int64_t blocks);
std::vector<PlanRegion> sqrt_regions(int64_t blocks);
std::shared_ptr<const ActivationPlan> make_plan(const ChainProfile& profile,
                                                std::vector<PlanRegion> regions);

/// The smallest budget for which a plan exists.
int64_t least_budget(const ChainProfile& profile);
/// Memory without recomputation.
int64_t full_budget(const ChainProfile& profile);
/// The budget in bytes. A share is of the memory without recomputation. If it is below
/// first_peak_bytes, which no plan changes, the budget is first_peak_bytes plus that share of the
/// rest, and a warning is logged.
int64_t budget_of(const ChainProfile& profile, const GradientCheckpointing& spec);

/// Plans between the smallest and the full budget, each faster than the one before.
std::vector<std::shared_ptr<const ActivationPlan>> pareto_plans(const ChainProfile& profile,
                                                                int64_t points = 24);
/// The plans as a table, and as an SVG plot of time over peak.
std::string pareto_table(const ChainProfile& profile,
                         const std::vector<std::shared_ptr<const ActivationPlan>>& plans);
std::string pareto_svg(const ChainProfile& profile,
                       const std::vector<std::shared_ptr<const ActivationPlan>>& plans);

/// Peak of one forward and backward of `loss`, counted as for a budget. Restores gradients and
/// random state.
int64_t observe_peak(const std::shared_ptr<torch::nn::Module>& model,
                     const std::function<at::Tensor()>& loss);

/// Profiles, plans, enables and runs. While the observed peak is above the budget, it plans again
/// with less memory. Leaves checkpointing enabled. Throws InputError with the smallest possible
/// budget.
std::shared_ptr<const ActivationPlan> enable_within_budget(
    const std::shared_ptr<torch::nn::Module>& model, const std::function<at::Tensor()>& loss,
    const GradientCheckpointing& budget);

} // namespace hasten
