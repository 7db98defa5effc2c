// Learning rates over a run: a multiplier of each group's first learning rate,
// as a function of the updates completed. Values equal Hugging Face's.
// Threading: one thread. Lifetime: LRScheduler keeps a reference to its
// optimizer; neither is moved.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "hasten/core/stateful.h"

namespace hasten {

/// m(k): k = updates completed, >= 0; the next update runs at m(k) * peak.
using Schedule = std::function<double(int64_t completed_updates)>;

// W = warmup_steps, updates over which the rate rises as k / W from 0 (the first
// update runs at 0); N = total_steps. p = (k - W) / max(1, N - W). All throw
// InputError for a warm-up below 0 or above its total, and for other numbers out
// of the range given. Names and formulas are those of transformers'
// optimization.py; after N they go on as theirs do.

/// Then max(0, 1 - p): the last update runs at 1 / (N - W), never at 0.
Schedule linear_schedule(int64_t warmup_steps, int64_t total_steps);
/// 1.
Schedule constant_schedule();
/// Then 1.
Schedule constant_schedule_with_warmup(int64_t warmup_steps);
/// Then (1 + cos(2 pi num_cycles p)) / 2, at least 0. num_cycles > 0; 0.5 falls
/// once to 0. It rises again after N.
Schedule cosine_schedule(int64_t warmup_steps, int64_t total_steps, double num_cycles = 0.5);
/// Then (1 + cos(pi frac(num_cycles p))) / 2, 0 from N on: num_cycles >= 1 falls
/// to 0, each beginning at 1 again.
Schedule cosine_with_restarts_schedule(int64_t warmup_steps, int64_t total_steps,
                                       int64_t num_cycles = 1);
/// Then cosine (1 - min_lr_rate) + min_lr_rate; 0 <= min_lr_rate <= 1 is a share
/// of the peak.
Schedule cosine_with_min_lr_schedule(int64_t warmup_steps, int64_t total_steps, double min_lr_rate,
                                     double num_cycles = 0.5);
/// Then (1 - end_rate) (1 - p)^power + end_rate; end_rate after N. 0 <= end_rate < 1
/// is lr_end / peak (transformers: 1e-7 / peak), power > 0. W < N.
Schedule polynomial_schedule(int64_t warmup_steps, int64_t total_steps, double end_rate,
                             double power = 1.0);
/// Then 1 / sqrt((k + t - W) / t), t = timescale; 0: W, or 10000 where W is 0.
Schedule inverse_sqrt_schedule(int64_t warmup_steps, int64_t timescale = 0);

/// How warmup_stable_decay_schedule goes up and down. x: share of the phase done.
enum class PhaseShape {
  /// Up by x, down by 1 - x.
  linear,
  /// Up by (1 - cos(pi x)) / 2, down by (1 + cos(2 pi num_cycles x)) / 2.
  cosine,
  /// Up by 1 - sqrt(1 - x), down by 1 - sqrt(x).
  one_minus_sqrt
};

struct WarmupStableDecayOptions {
  /// Updates of each phase, >= 0.
  int64_t warmup_steps = 0;
  int64_t stable_steps = 0;
  int64_t decay_steps = 0;
  PhaseShape warmup_type = PhaseShape::linear;
  PhaseShape decay_type = PhaseShape::cosine;
  /// Share of the peak at which warm-up begins and decay ends, 0 to 1.
  double min_lr_ratio = 0;
  /// Of a cosine decay, > 0.
  double num_cycles = 0.5;
};
/// Up, then 1, then down, then min_lr_ratio.
Schedule warmup_stable_decay_schedule(const WarmupStableDecayOptions& options);

struct OneCycleOptions {
  /// Updates of the cycle, >= 2; then the rate stays at its least.
  int64_t total_steps = 0;
  /// Share of the updates in which the rate rises, above 0 and below 1 (below
  /// 0.5 with three_phase).
  double pct_start = 0.3;
  /// Cosine or straight.
  bool cosine = true;
  /// It begins at peak / div_factor and ends at that / final_div_factor. > 0.
  double div_factor = 25;
  double final_div_factor = 1e4;
  /// Down to the beginning in as many updates as up, then to the end.
  bool three_phase = false;
};
/// torch.optim.lr_scheduler.OneCycleLR's learning rate (Smith and Topin,
/// arXiv 1708.07120). Momentum stays as it is.
Schedule one_cycle_schedule(const OneCycleOptions& options);

class LRScheduler final : public Stateful {
 public:
  /// Takes the groups' present learning rates as peaks and sets m(0) at once.
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Call once after each optimizer step that was not skipped. Local.
  void step();
  /// The learning rate the next update uses. [group]
  const std::vector<double>& get_last_lr() const { return last_lr_; }
  int64_t completed_updates() const { return completed_updates_; }
  /// Peak of each group. Setting them sets the present learning rates.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  void set_base_lrs(std::vector<double> base_lrs);
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// values: completed_updates, base_lrs. No tensors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Sets the optimizer's learning rates as well.
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
