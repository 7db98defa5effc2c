// Learning-rate schedules: a multiplier of each group's initial learning rate as a function of the
// completed optimizer steps. Values equal Hugging Face's.
// Threading: one thread. Lifetime: LRScheduler keeps a reference to its optimizer. Do not move
// either of them.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "hasten/core/stateful.h"

namespace hasten {

/// m(k) for k >= 0 completed optimizer steps. The next step uses m(k) * peak.
using Schedule = std::function<double(int64_t completed_updates)>;

// W = warmup_steps: the steps in which the multiplier rises as k / W from 0 (the first step runs at
// 0). N = total_steps. p = (k - W) / max(1, N - W). All functions throw InputError if the warm-up
// is below 0 or above the total, and for other values out of range. Names and formulas, also for k
// > N, are those of transformers' optimization.py.

/// After the warm-up: max(0, 1 - p). The last step runs at 1 / (N - W), never at 0.
Schedule linear_schedule(int64_t warmup_steps, int64_t total_steps);
/// Always 1.
Schedule constant_schedule();
/// After the warm-up: 1.
Schedule constant_schedule_with_warmup(int64_t warmup_steps);
/// After the warm-up: (1 + cos(2 pi num_cycles p)) / 2, at least 0. num_cycles > 0; 0.5 falls to 0
/// once. For k > N it rises again.
Schedule cosine_schedule(int64_t warmup_steps, int64_t total_steps, double num_cycles = 0.5);
/// After the warm-up: (1 + cos(pi frac(num_cycles p))) / 2, and 0 from N on. The num_cycles >= 1
/// cycles each fall from 1 to 0.
Schedule cosine_with_restarts_schedule(int64_t warmup_steps, int64_t total_steps,
                                       int64_t num_cycles = 1);
/// After the warm-up: c (1 - min_lr_rate) + min_lr_rate, c as in cosine_schedule. min_lr_rate is
/// relative to the peak, 0 to 1.
Schedule cosine_with_min_lr_schedule(int64_t warmup_steps, int64_t total_steps, double min_lr_rate,
                                     double num_cycles = 0.5);
/// After the warm-up: (1 - end_rate) (1 - p)^power + end_rate; for k > N end_rate. 0 <= end_rate <
/// 1 is lr_end / peak (transformers: 1e-7 / peak). power > 0. W < N.
Schedule polynomial_schedule(int64_t warmup_steps, int64_t total_steps, double end_rate,
                             double power = 1.0);
/// After the warm-up: 1 / sqrt((k + t - W) / t), t = timescale. timescale = 0 means W, or 10000 if
/// W is 0.
Schedule inverse_sqrt_schedule(int64_t warmup_steps, int64_t timescale = 0);

/// Shape of a phase of warmup_stable_decay_schedule. x is the completed share of the phase.
enum class PhaseShape {
  /// Rises as x, falls as 1 - x.
  linear,
  /// Rises as (1 - cos(pi x)) / 2, falls as (1 + cos(2 pi num_cycles x)) / 2.
  cosine,
  /// Rises as 1 - sqrt(1 - x), falls as 1 - sqrt(x).
  one_minus_sqrt
};

struct WarmupStableDecayOptions {
  /// Optimizer steps of each phase, >= 0.
  int64_t warmup_steps = 0;
  int64_t stable_steps = 0;
  int64_t decay_steps = 0;
  PhaseShape warmup_type = PhaseShape::linear;
  PhaseShape decay_type = PhaseShape::cosine;
  /// Multiplier at the start of the warm-up and the end of the decay, 0 to 1.
  double min_lr_ratio = 0;
  /// Cycles of a cosine decay, > 0.
  double num_cycles = 0.5;
};
/// Rises to 1, stays there, falls, and then stays at min_lr_ratio.
Schedule warmup_stable_decay_schedule(const WarmupStableDecayOptions& options);

struct OneCycleOptions {
  /// Optimizer steps of the cycle, >= 2. After it the learning rate stays at its minimum.
  int64_t total_steps = 0;
  /// Share of the steps in which the learning rate rises, in (0, 1); with three_phase in (0, 0.5).
  double pct_start = 0.3;
  /// Cosine annealing; false: linear.
  bool cosine = true;
  /// The learning rate starts at peak / div_factor and ends at that value / final_div_factor. Both
  /// > 0.
  double div_factor = 25;
  double final_div_factor = 1e4;
  /// The rate falls to its start value in as many steps as it rose, and then to its final value.
  bool three_phase = false;
};
/// The learning rate of torch.optim.lr_scheduler.OneCycleLR (Smith and Topin, arXiv 1708.07120).
/// Momentum does not change.
Schedule one_cycle_schedule(const OneCycleOptions& options);

class LRScheduler final : public Stateful {
 public:
  /// Uses the groups' current learning rates as peaks and sets the learning rates to m(0) · peak.
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Call once after each optimizer step that was not skipped. Local.
  void step();
  /// Learning rate of the next optimizer step. [group]
  const std::vector<double>& get_last_lr() const { return last_lr_; }
  int64_t completed_updates() const { return completed_updates_; }
  /// Peak of each group. set_base_lrs() also sets the current learning rates.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  void set_base_lrs(std::vector<double> base_lrs);
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// values: completed_updates, base_lrs. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Also sets the optimizer's learning rates.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  void apply();

  torch::optim::Optimizer& optimizer_;
  Schedule schedule_;
  std::vector<double> base_lrs_{}; // [group]
  std::vector<double> last_lr_{}; // [group]
  int64_t completed_updates_ = 0;
};

} // namespace hasten
