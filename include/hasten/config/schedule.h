// Learning-rate schedules: a multiplier of each group's initial learning rate as a function of the
// completed optimizer steps. Values equal Hugging Face's. optim/schedule.h applies them.
// make_schedule() makes them by the names and keywords of --lr-scheduler-type and --lr-scheduler-kwargs.
// Threading: any thread may call every function.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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

/// Of optim/plateau.h.
struct ReduceLrOnPlateauOptions {
  /// Whether a larger metric is better; false: a smaller one.
  bool greater_is_better = false;
  /// Multiplies the learning rates, in (0, 1).
  double factor = 0.1;
  /// Evaluations without an improvement before a reduction, >= 0.
  int64_t patience = 10;
  /// Minimum improvement of the metric that counts as better, >= 0. If `relative`, a share of the
  /// best value.
  double threshold = 1e-4;
  bool relative = true;
  /// Evaluations after a reduction that are not counted, >= 0.
  int64_t cooldown = 0;
  /// Lower bound of the learning rates, >= 0.
  double min_lr = 0;
  /// Reductions that are not larger than this are skipped, >= 0.
  double eps = 1e-8;
};

/// The names of all schedules, sorted. hasten has linear, cosine, cosine_with_restarts,
/// cosine_with_min_lr, polynomial, constant, constant_with_warmup, inverse_sqrt, warmup_stable_decay,
/// reduce_lr_on_plateau and one_cycle (torch's OneCycleLR).
std::vector<std::string> schedule_names();

/// Makes a schedule. `kwargs` is an object, or null for none. Keys, required ones with *:
///   cosine                num_cycles (0.5)
///   cosine_with_restarts  num_cycles (1)
///   cosine_with_min_lr    num_cycles (0.5), and one of min_lr, min_lr_rate *
///   polynomial            lr_end (1e-7), power (1)
///   inverse_sqrt          timescale
///   warmup_stable_decay   num_decay_steps *, num_stable_steps (the remaining steps),
///                         warmup_type, decay_type (linear, cosine, 1-sqrt),
///                         min_lr_ratio, num_cycles
///   one_cycle             pct_start, anneal_strategy (cos, linear), div_factor,
///                         final_div_factor, three_phase
/// The others have no keys. reduce_lr_on_plateau is constant here. lr_end and min_lr are divided by
/// `peak_lr`. constant, one_cycle and reduce_lr_on_plateau ignore the warm-up, as in Hugging Face.
/// Throws InputError for an unknown name or key (the message has the most similar one), a value of
/// another type or out of range, and, for every schedule, a warm-up longer than the total.
Schedule make_schedule(const std::string& name, int64_t warmup_steps, int64_t total_steps,
                       double peak_lr, const nlohmann::json& kwargs);

/// What make_schedule() was called with.
struct ScheduleRequest {
  std::string name{};
  int64_t warmup_steps = 0; // at most total_steps
  int64_t total_steps = 0;
  double peak_lr = 0;
  nlohmann::json kwargs{}; // an object or null
};
using ScheduleFactory = std::function<Schedule(const ScheduleRequest& request)>;

/// Adds a schedule, for the rest of the process: then TrainingArguments::lr_scheduler_type has its
/// name. The factory throws InputError for kwargs that it does not have. Throws InputError for an
/// empty name, one that is there, and without a factory.
void register_schedule(const std::string& name, ScheduleFactory factory);
/// Throws InputError "[where] lr_scheduler_type=name" for a name that is not registered.
void check_schedule_name(const char* where, const std::string& name);

/// Options of reduce_lr_on_plateau from the keys mode (min, max; by default from
/// `greater_is_better`), factor, patience, threshold, threshold_mode (rel, abs), cooldown, min_lr,
/// eps.
ReduceLrOnPlateauOptions plateau_options(const nlohmann::json& kwargs, bool greater_is_better);

} // namespace hasten
