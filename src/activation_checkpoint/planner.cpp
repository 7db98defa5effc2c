// The dynamic programme over blocks and bytes.
//
// Stages 0 … n-1 are the blocks. Stage n is what follows them. T(s, t, m) is the least time to run
// stages s … t forward and backward with m free bytes. m does not include the input of s, which is
// in memory. It includes the gradient of t's output.
//
//   T(s, s, m)  = r_s + b_s           if it fits. r_s, not f_s: a single block is the end of a
//                                     recomputation, which stops early
//   T(n, n, m)  = 0                   if its peak fits
//   T(s, t, m)  = min of
//     keep      f_s + T(s+1, t, m - A_s) + b_s
//     keep ops  f_s + T(s+1, t, m - O_s) + q_s + b_s
//     region    f_s + … + f_{k-1} + T(k, t, m - a_{k-1}) + T(s, k-1, m)
//               over s < k <= t
//
// if each peak fits into m. Sizes are rounded up to slots of m / 500 or less, so a plan that is
// found fits. The simple plans are additional candidates, since their sizes are not rounded.
#include "hasten/activation_checkpoint/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "block_regions.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

// Few blocks get more slots, as many as a table with this number of cells allows.
constexpr int kLeastSlots = 500;
constexpr int kMostSlots = 4000;
constexpr int kCells = 2'000'000; // of 16 bytes
constexpr double kNever = std::numeric_limits<double>::infinity();

static int slots_for(const ChainProfile& profile) {
  const auto stages = static_cast<int>(profile.blocks.size()) + 1;
  return std::clamp(kCells / (stages * stages), kLeastSlots, kMostSlots);
}

class PlanSolver {
 public:
  /// `bytes` is the budget of the chain, without the memory in use when it begins.
  PlanSolver(const ChainProfile& profile, int64_t bytes, bool with_ops)
      : profile_(profile),
        blocks_(static_cast<int>(profile.blocks.size())),
        with_ops_(with_ops),
        slot_(std::max<int64_t>(1, (bytes + slots_for(profile) - 1) / slots_for(profile))),
        slots_(static_cast<int>(bytes / slot_)) {
    table_.resize(static_cast<size_t>((blocks_ + 1) * (blocks_ + 1)));
    solve();
  }

  /// Time of the whole chain with all slots; kNever if it does not fit.
  double seconds() const { return time(0, blocks_, slots_); }
  /// Smallest number of bytes that is enough; -1 if all slots are too few.
  int64_t least_bytes() const {
    for (int m = 0; m <= slots_; ++m) {
      if (time(0, blocks_, m) < kNever) {
        return static_cast<int64_t>(m) * slot_;
      }
    }
    return -1;
  }
  std::vector<PlanRegion> regions() const {
    std::vector<PlanRegion> found;
    trace(0, blocks_, slots_, found);
    std::stable_sort(found.begin(), found.end(), [](const PlanRegion& a, const PlanRegion& b) {
      return a.first != b.first ? a.first < b.first : a.last > b.last;
    });
    return found;
  }

 private:
  // The best choice in a state: 0 keep, -1 keep ops, k > s region [s, k).
  struct Cell {
    double seconds = kNever;
    int choice = 0;
  };
  static constexpr int kKeep = 0;
  static constexpr int kKeepOps = -1;

  const BlockProfile& at(int s) const { return profile_.blocks[static_cast<size_t>(s)]; }
  int in_slots(int64_t bytes) const {
    return static_cast<int>(
        std::min<int64_t>((bytes + slot_ - 1) / slot_, static_cast<int64_t>(kMostSlots) * 4));
  }
  std::vector<Cell>& cells(int s, int t) {
    return table_[static_cast<size_t>(s * (blocks_ + 1) + t)];
  }
  const Cell& cell(int s, int t, int m) const {
    return table_[static_cast<size_t>(s * (blocks_ + 1) + t)][static_cast<size_t>(m)];
  }
  double time(int s, int t, int m) const { return m < 0 ? kNever : cell(s, t, m).seconds; }

  // Peak of stage s itself, in slots, if it keeps `kept` bytes for a backward that takes `extra`.
  // The gradient of t's output is in memory in forward.
  int need(int s, int t, int64_t kept, int64_t extra) const {
    const BlockProfile& b = at(s);
    return in_slots(
        std::max(output_bytes(t) + b.saved_bytes + b.forward_extra, b.output_bytes + kept + extra));
  }
  int64_t output_bytes(int s) const { return s == blocks_ ? 0 : at(s).output_bytes; }

  void solve() {
    cells(blocks_, blocks_).assign(static_cast<size_t>(slots_) + 1, Cell{});
    const int after = in_slots(profile_.after_bytes);
    for (int m = after; m <= slots_; ++m) {
      cells(blocks_, blocks_)[static_cast<size_t>(m)].seconds = 0;
    }
    for (int s = blocks_ - 1; s >= 0; --s) {
      cells(s, s).assign(static_cast<size_t>(slots_) + 1, Cell{});
      for (int m = in_slots(alone_bytes(at(s))); m <= slots_; ++m) {
        cells(s, s)[static_cast<size_t>(m)].seconds =
            at(s).recompute_seconds + at(s).backward_seconds;
      }
      for (int t = s + 1; t <= blocks_; ++t) {
        solve_range(s, t);
      }
    }
  }

  void solve_range(int s, int t) {
    std::vector<Cell>& best = cells(s, t);
    best.assign(static_cast<size_t>(slots_) + 1, Cell{});
    const BlockProfile& block = at(s);
    const double plain = block.forward_seconds + block.backward_seconds;
    const auto improve = [&](int m, double seconds, int choice) {
      Cell& here = best[static_cast<size_t>(m)];
      if (seconds < here.seconds) {
        here = {seconds, choice};
      }
    };
    const int saved = in_slots(block.saved_bytes);
    for (int m = need(s, t, block.saved_bytes, block.backward_extra); m <= slots_; ++m) {
      improve(m, plain + time(s + 1, t, m - saved), kKeep);
    }
    const int ops_saved = in_slots(block.ops_saved_bytes);
    const double with_ops = plain + block.ops_recompute_seconds;
    for (int m = need(s, t, block.ops_saved_bytes, block.ops_backward_extra);
         with_ops_ && m <= slots_; ++m) {
      improve(m, with_ops + time(s + 1, t, m - ops_saved), kKeepOps);
    }
    double forward = 0;
    int64_t peak = 0; // of forward through the region so far
    for (int k = s + 1; k <= t; ++k) {
      const BlockProfile& last = at(k - 1);
      forward += last.forward_seconds;
      peak = std::max(peak, (k - 1 == s ? 0 : output_bytes(k - 2)) + last.dropped_peak);
      const int rest = in_slots(last.output_bytes);
      for (int m = in_slots(output_bytes(t) + peak); m <= slots_; ++m) {
        improve(m, forward + time(k, t, m - rest) + time(s, k - 1, m), k);
      }
    }
  }

  void trace(int s, int t, int m, std::vector<PlanRegion>& found) const {
    if (s == t) {
      return; // a kept block, or stage n
    }
    const int choice = cell(s, t, m).choice;
    if (choice == kKeep) {
      trace(s + 1, t, m - in_slots(at(s).saved_bytes), found);
    } else if (choice == kKeepOps) {
      found.push_back({s, s + 1, BlockChoice::keep_ops});
      trace(s + 1, t, m - in_slots(at(s).ops_saved_bytes), found);
    } else {
      found.push_back({s, choice, BlockChoice::keep});
      trace(s, choice - 1, m, found);
      trace(choice, t, m - in_slots(output_bytes(choice - 1)), found);
    }
  }

  const ChainProfile& profile_;
  int blocks_;
  bool with_ops_;
  int64_t slot_;
  int slots_;
  std::vector<std::vector<Cell>> table_{};
};

/// Bytes that do not depend on the plan.
static int64_t fixed_bytes(const ChainProfile& profile) {
  return profile.before_bytes + profile.after_left_bytes;
}

[[noreturn]] static void refuse_budget(const ChainProfile& profile, int64_t budget, int64_t least) {
  throw InputError("activation_checkpoint::plan",
                   "budget=" + std::to_string(budget) + " bytes (" + format_bytes(budget) +
                       ") for activations of " + std::to_string(profile.blocks.size()) + " blocks",
                   "at least " + std::to_string(least) + " bytes (" + format_bytes(least) +
                       "); keeping everything takes " + format_bytes(full_budget(profile)),
                   "raise the budget, or reduce the batch size");
}

// Smallest memory of the chain for which a plan was found. Each attempt uses finer slots, made from
// the result of the coarser ones, and is verified, because other slots round differently.
static int64_t least_chain(const ChainProfile& profile, bool with_ops) {
  int64_t chain = full_budget(profile) - fixed_bytes(profile);
  int64_t next = PlanSolver(profile, chain, with_ops).least_bytes();
  for (int attempt = 0; attempt < 8 && next > 0 && next < chain; ++attempt) {
    const PlanSolver solver(profile, next, with_ops);
    if (solver.seconds() < kNever) {
      chain = next;
      next = solver.least_bytes();
    } else {
      next += next / slots_for(profile) + 1;
    }
  }
  return chain;
}

static std::shared_ptr<const ActivationPlan> plan_within(const ChainProfile& profile,
                                                         int64_t budget, bool with_ops) {
  const int64_t chain = budget - fixed_bytes(profile);
  if (chain <= 0 || profile.first_peak_bytes > budget) {
    refuse_budget(profile, budget, least_budget(profile));
  }
  // The fastest of the solver's plan and the simple plans that fit.
  const auto planned = [&](const PlanSolver& solver) {
    auto best = make_plan(profile, solver.regions());
    for (const SimplePlan& rule : simple_plans(profile)) {
      auto plan = make_plan(profile, rule.regions);
      if (plan->predicted_peak_bytes <= budget &&
          plan->predicted_seconds < best->predicted_seconds) {
        best = std::move(plan);
      }
    }
    auto plan = std::make_shared<ActivationPlan>(*best);
    plan->budget_bytes = budget;
    return plan;
  };
  const PlanSolver solver(profile, chain, with_ops);
  if (solver.seconds() < kNever) {
    return planned(solver);
  }
  // Rounding to slots can make a larger budget fail where the smallest one works.
  const int64_t least = least_chain(profile, with_ops);
  if (least <= chain) {
    return planned(PlanSolver(profile, least, with_ops));
  }
  refuse_budget(profile, budget, least_budget(profile));
}

} // namespace detail

std::shared_ptr<const ActivationPlan> plan_activations(const ChainProfile& profile,
                                                       int64_t budget_bytes) {
  return detail::plan_within(profile, budget_bytes, true);
}

std::shared_ptr<const ActivationPlan> plan_whole_blocks(const ChainProfile& profile,
                                                        int64_t budget_bytes) {
  return detail::plan_within(profile, budget_bytes, false);
}

int64_t least_budget(const ChainProfile& profile) {
  return std::max(detail::fixed_bytes(profile) + detail::least_chain(profile, true),
                  profile.first_peak_bytes);
}

int64_t full_budget(const ChainProfile& profile) {
  const auto blocks = static_cast<int64_t>(profile.blocks.size());
  // With the solver's rounding added, so that it finds the plan that keeps everything.
  const int64_t peak = plan_cost(profile, {}).peak_bytes;
  return peak + (blocks + 2) * (peak / detail::slots_for(profile) + 1);
}

int64_t budget_of(const ChainProfile& profile, const GradientCheckpointing& spec) {
  if (spec.budget_bytes() > 0) {
    return spec.budget_bytes();
  }
  const auto full = static_cast<double>(plan_cost(profile, {}).peak_bytes);
  const auto share = static_cast<int64_t>(full * spec.budget_share());
  const int64_t floor = profile.first_peak_bytes;
  if (floor <= share) {
    return share;
  }
  const auto rest = spec.budget_share() * (full - static_cast<double>(floor));
  const int64_t bytes = std::max(floor + static_cast<int64_t>(rest), least_budget(profile));
  log_warning("gradient_checkpointing=" + spec.text() + " is " + format_bytes(share) +
              ", but the layers before the blocks need " + format_bytes(floor) +
              " in backward under every plan (the gradient of a word embedding "
              "is as large as its table). The share now applies to the rest: " +
              format_bytes(bytes) + " in total");
  return bytes;
}

std::vector<std::shared_ptr<const ActivationPlan>> pareto_plans(const ChainProfile& profile,
                                                                int64_t points) {
  std::vector<std::shared_ptr<const ActivationPlan>> plans;
  const auto least = static_cast<double>(least_budget(profile));
  const auto full = static_cast<double>(full_budget(profile));
  for (int64_t i = 0; i < points; ++i) {
    const double share = static_cast<double>(i) / static_cast<double>(points - 1);
    const double budget = least * std::pow(full / least, share);
    const auto plan = plan_activations(profile, static_cast<int64_t>(std::ceil(budget)));
    if (plans.empty() || plan->predicted_seconds < plans.back()->predicted_seconds * (1 - 1e-9)) {
      plans.push_back(plan);
    }
  }
  return plans;
}

namespace detail {

// Runs a step with a plan and records its peak.
static std::shared_ptr<const ActivationPlan> observed(
    const std::shared_ptr<torch::nn::Module>& model, const std::function<at::Tensor()>& loss,
    const ActivationPlan& plan, int64_t budget) {
  auto seen = std::make_shared<ActivationPlan>(plan);
  seen->budget_bytes = budget;
  gradient_checkpointing_enable(model, {.plan = seen});
  seen->observed_peak_bytes = observe_peak(model, loss);
  return seen;
}

// Note [The budget that is planned for]
// The sizes of a profile add up to slightly more or less than a step needs. So the budget for
// planning increases by what a step left unused of the real budget, and decreases by what it used
// too much, until both are close or enough steps were run.
static std::shared_ptr<const ActivationPlan> best_observed(
    const std::shared_ptr<torch::nn::Module>& model, const std::function<at::Tensor()>& loss,
    const ChainProfile& profile, int64_t bytes) {
  const int64_t close = std::max<int64_t>(1, bytes / 100);
  std::shared_ptr<const ActivationPlan> best;
  int64_t fits = 0;
  int64_t above = bytes + bytes / 5;
  int64_t planned = bytes;
  // While no plan fits, more steps are worth their time.
  for (int attempt = 0; attempt < (best ? 4 : 8); ++attempt) {
    std::shared_ptr<const ActivationPlan> plan;
    try {
      plan = plan_activations(profile, planned);
    } catch (const InputError&) {
      break;
    }
    plan = observed(model, loss, *plan, bytes);
    const int64_t over = plan->observed_peak_bytes - bytes;
    if (over > 0) {
      above = planned;
      planned -= over + close; // if that is too much, the middle is next
    } else {
      fits = planned;
      best = plan;
      planned -= std::min(over, -close);
    }
    if (above - fits <= close || (best && -over < close && over <= 0) ||
        (best && best->regions.empty())) {
      break;
    }
    if (planned <= fits || planned >= above) {
      planned = (fits + above) / 2;
    }
  }
  if (!best) {
    gradient_checkpointing_disable(model);
    refuse_budget(profile, bytes, least_budget(profile) + std::max<int64_t>(0, bytes - planned));
  }
  return best;
}

// A simple plan may be as fast as the computed plan, or faster, because the plan depends on
// measured times. If the predictions are close, steps of both in turn decide.
static std::shared_ptr<const ActivationPlan> quicker_of(
    const std::shared_ptr<torch::nn::Module>& model, const std::function<at::Tensor()>& loss,
    int64_t bytes, std::shared_ptr<const ActivationPlan> best,
    const std::shared_ptr<const ActivationPlan>& rule) {
  constexpr double kClose = 1.05;
  constexpr double kTie = 1.02; // variation of equal steps
  constexpr int kRepetitions = 2;
  if (rule->predicted_seconds > kClose * best->predicted_seconds ||
      rule->predicted_peak_bytes > bytes + bytes / 4) {
    return best;
  }
  const auto seen = observed(model, loss, *rule, bytes);
  if (seen->observed_peak_bytes > bytes) {
    return best;
  }
  double seconds[2] = {kNever, kNever};
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    for (const int i : {0, 1}) {
      gradient_checkpointing_enable(model, {.plan = i == 0 ? best : seen});
      seconds[i] = std::min(seconds[i], observe_step(model, loss).seconds);
    }
  }
  return seconds[1] <= kTie * seconds[0] ? seen : best;
}

} // namespace detail

std::shared_ptr<const ActivationPlan> enable_within_budget(
    const std::shared_ptr<torch::nn::Module>& model, const std::function<at::Tensor()>& loss,
    const GradientCheckpointing& budget) {
  const ChainProfile profile = profile_activations(model, loss);
  const int64_t bytes = budget_of(profile, budget);
  auto best = detail::best_observed(model, loss, profile, bytes);
  for (const detail::SimplePlan& rule : detail::simple_plans(profile)) {
    best =
        detail::quicker_of(model, loss, bytes, std::move(best), make_plan(profile, rule.regions));
  }
  gradient_checkpointing_enable(model, {.plan = best});
  return best;
}

} // namespace hasten
