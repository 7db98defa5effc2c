// What to recompute under a budget of bytes: measure a model's blocks in one step,
// solve, run, look at the real peak, and plan again if it is above the budget.
//
//   auto profile = hasten::profile_activations(model, loss);
//   auto plan = hasten::plan_activations(profile, budget_bytes);
//   hasten::gradient_checkpointing_enable(model, {.plan = plan});
//
// or all of it, with the look at the peak: hasten::enable_within_budget.
//
// The plans are nested regions of consecutive blocks. Among those, and under the
// measured sizes and times, the one found is the quickest (the persistent plans of
// Beaumont et al., arXiv 1911.13214, with early stop and per-block operator policies
// added); the general problem is NP-hard. Time O(slots * blocks^3), 500 to 4000 slots.
// The budget counts activations: what one forward and backward allocate beyond what
// was there before, without parameters, their gradients and optimizer state.
// Libraries' own scratch memory is not seen.
// Threading: values are immutable once made; functions are local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "hasten/activation_checkpoint/checkpoint_spec.h"

namespace torch::nn {
class Module;
}

namespace hasten {

/// What one block takes: seconds, and bytes beyond what was there before it.
/// Storages are counted once; parameters and the block's input are not.
struct BlockProfile {
  std::string name{};
  double forward_seconds = 0;
  double backward_seconds = 0;
  /// From its input to the last tensor that backward needs.
  double recompute_seconds = 0;
  /// Its output.
  int64_t output_bytes = 0;
  /// Everything kept for backward, output included.
  int64_t saved_bytes = 0;
  /// Most in forward beyond saved_bytes.
  int64_t forward_extra = 0;
  /// Most in a forward that keeps nothing, output included.
  int64_t dropped_peak = 0;
  /// Most in backward beyond saved_bytes and the gradient of the output.
  int64_t backward_extra = 0;
  /// Most in a recomputation and the backward that follows, with the gradient of
  /// the output and without the output, which a recomputation that stops early does
  /// not make. 0: output_bytes + saved_bytes + backward_extra.
  int64_t recompute_peak = 0;
  /// The same with expensive operators' results kept: kept for backward, most in
  /// backward beyond that and the gradient of the output, recompute time.
  int64_t ops_saved_bytes = 0;
  int64_t ops_backward_extra = 0;
  double ops_recompute_seconds = 0;
  /// Its forward draws random numbers.
  bool random = false;
  /// Of a sharded block: charged for each recomputation beyond the first, and for
  /// as long as it runs. Not measured: set by who shards.
  double gather_seconds = 0;
  int64_t unit_bytes = 0;
};

struct ChainProfile {
  std::vector<BlockProfile> blocks{};
  /// Of blocks' names, parameters' and inputs' shapes.
  std::string shapes_hash{};
  /// Alive when the first block begins: its input, and what came before it.
  int64_t before_bytes = 0;
  /// Most after the last block until its output's gradient is there.
  int64_t after_bytes = 0;
  /// Of these, what stays until the end (loss, logits).
  int64_t after_left_bytes = 0;
  /// Most while what came before the first block is derived; not below it can a
  /// budget be.
  int64_t first_peak_bytes = 0;
  /// Of all that is no block.
  double other_seconds = 0;
};

enum class BlockChoice {
  /// Everything backward needs is kept.
  keep,
  /// Expensive operators' results are kept.
  keep_ops,
};

/// Blocks [first, last) are one region; within another or beside it.
struct PlanRegion {
  int64_t first = 0;
  int64_t last = 0;
  /// Regions of one block only.
  BlockChoice choice = BlockChoice::keep;
};

class ActivationPlan {
 public:
  std::vector<std::string> blocks{};
  /// Outer ones before inner ones, by rising first. Blocks in none are kept.
  std::vector<PlanRegion> regions{};
  std::string shapes_hash{};
  int64_t budget_bytes = 0;
  /// Of a forward and backward. Peak as budgets count.
  int64_t predicted_peak_bytes = 0;
  double predicted_seconds = 0;
  /// 0 until a step was run under it.
  int64_t observed_peak_bytes = 0;

  nlohmann::json to_json() const;
  /// Throws InputError naming `source` and what is wrong: a key, regions that
  /// overlap.
  static ActivationPlan from_json(const nlohmann::json& json, const std::string& source = "plan");
  /// Throws InputError where the plan was made for other shapes.
  void require_shapes(const ChainProfile& profile) const;
};

/// Measures each block by itself inside one call of `loss`, which runs the model's
/// forward and returns the scalar to derive, and derives it. A block is run ten
/// times or more and its least time counts, those of equal shapes are measured only
/// once; between blocks nothing is kept, so this fits where training does not. Random state, buffers and gradients
/// are as before. Installs the memory meter (core/memory.h).
/// Before prepare(): hooks on parameters would see the measuring.
/// Throws InputError where no block is called.
ChainProfile profile_activations(const std::shared_ptr<torch::nn::Module>& model,
                                 const std::function<at::Tensor()>& loss);

/// The quickest plan within `budget_bytes`. Throws InputError naming the least
/// budget that works.
std::shared_ptr<const ActivationPlan> plan_activations(const ChainProfile& profile,
                                                       int64_t budget_bytes);
/// The same with blocks kept or recomputed as a whole only.
std::shared_ptr<const ActivationPlan> plan_whole_blocks(const ChainProfile& profile,
                                                        int64_t budget_bytes);

/// Peak and time of a plan under a profile, step by step.
struct PlanCost {
  int64_t peak_bytes = 0;
  double seconds = 0;
};
PlanCost plan_cost(const ChainProfile& profile, const std::vector<PlanRegion>& regions);

/// Simple plans to compare with: nothing; each block; ceil(sqrt(n)) regions.
std::vector<PlanRegion> keep_all_regions(int64_t blocks);
std::vector<PlanRegion> each_block_regions(int64_t blocks);
std::vector<PlanRegion> sqrt_regions(int64_t blocks);
std::shared_ptr<const ActivationPlan> make_plan(const ChainProfile& profile,
                                                std::vector<PlanRegion> regions);

int64_t least_budget(const ChainProfile& profile);
/// What keeping everything takes.
int64_t full_budget(const ChainProfile& profile);
/// Bytes of a budget given in bytes or as a share of what keeping everything takes. A
/// share that is below first_peak_bytes, which no plan changes, is that and a share of
/// the rest, with a warning in the log.
int64_t budget_of(const ChainProfile& profile, const GradientCheckpointing& spec);

/// Plans from the least budget to the full one, each quicker than the one before.
std::vector<std::shared_ptr<const ActivationPlan>> pareto_plans(const ChainProfile& profile,
                                                                int64_t points = 24);
/// As a table, and as an SVG picture of peak against time.
std::string pareto_table(const ChainProfile& profile,
                         const std::vector<std::shared_ptr<const ActivationPlan>>& plans);
std::string pareto_svg(const ChainProfile& profile,
                       const std::vector<std::shared_ptr<const ActivationPlan>>& plans);

/// Peak of one forward and backward of `loss`, as budgets count. Gradients and
/// random state are as before.
int64_t observe_peak(const std::shared_ptr<torch::nn::Module>& model,
                     const std::function<at::Tensor()>& loss);

/// profile, plan, enable and run: while the observed peak is above the budget, the
/// plan is made again with less. Leaves checkpointing enabled.
/// Throws InputError naming the least budget that works.
std::shared_ptr<const ActivationPlan> enable_within_budget(
    const std::shared_ptr<torch::nn::Module>& model, const std::function<at::Tensor()>& loss,
    const GradientCheckpointing& budget);

} // namespace hasten
