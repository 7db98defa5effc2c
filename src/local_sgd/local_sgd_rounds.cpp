// When a scope averages, and how.

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <sstream>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "local_sgd_scope.h"

namespace hasten {

namespace detail {

bool SpreadWatch::grows(const AverageReport& report, double learning_rate) {
  const double unit = report.norm * (learning_rate > 0 ? learning_rate : 1);
  if (!(report.spread > 0) || !(unit > 0)) {
    return false;
  }
  last_.push_back(report.spread / unit);
  if (last_.size() > kRounds) {
    last_.pop_front();
  }
  const bool growing = !said_ && last_.size() == kRounds && last_.back() > 2 * last_.front() &&
                       std::ranges::adjacent_find(last_, std::greater_equal<>()) == last_.end();
  said_ = said_ || growing;
  return growing;
}

int64_t RoundSchedule::period(int64_t step) const {
  if (!options_.schedule) {
    return options_.local_sgd_steps;
  }
  const int64_t h = options_.schedule(step);
  if (h < 1) {
    throw InputError(kLocalSGDWhere, "schedule(" + std::to_string(step) + ")=" + std::to_string(h),
                     "1 or more optimizer steps between two averages");
  }
  return h;
}

int64_t RoundSchedule::due(int64_t step, int64_t fragments) {
  const int64_t start = options_.post_local_start;
  if (step <= start) {
    return kNothing;
  }
  if (fragments > 1) {
    const int64_t h = options_.local_sgd_steps;
    for (int64_t f = 0; f < fragments; ++f) {
      if ((step - start) % h == ((f + 1) * h / fragments) % h) {
        return f;
      }
    }
    return kNothing;
  }
  if (begin_ < 0 || step <= begin_) {
    begin_ = start;
    end_ = start + period(start);
  }
  while (end_ < step) {
    begin_ = end_;
    end_ += period(begin_);
  }
  return end_ == step ? Averager::kAll : kNothing;
}

} // namespace detail

bool LocalSGD::Impl::step() {
  if (!active || !count_step()) {
    return false;
  }
  if (!local) {
    if (progress.steps >= options.post_local_start) {
      announce(Part::whole, Averager::kAll);
      begin_local();
    }
    return false;
  }
  const int64_t fragment = schedule.due(progress.steps, averager->fragments());
  const bool due = fragment != detail::RoundSchedule::kNothing;
  bool averaged = false;
  if (averager->started() && (due || progress.steps >= progress.finish_at)) {
    make_round(Part::finish, Averager::kAll);
    averaged = true;
  }
  if (!due) { // only the largest level that is due runs
    if (options.inner_steps > 0 &&
        (progress.steps - options.post_local_start) % options.inner_steps == 0) {
      make_round(Part::inner, Averager::kAll);
    }
    return averaged;
  }
  make_round(options.delay > 0 ? Part::start : Part::whole, fragment);
  return averaged || !averager->started();
}

// False inside a window: nothing was attempted.
bool LocalSGD::Impl::count_step() {
  if (core->optimizers.of_model(index) != optimizers) {
    throw InputError(detail::kLocalSGDWhere,
                     "an optimizer of the model was prepared inside the scope",
                     "the optimizers from when it was opened",
                     "call finish() before, and open a new scope after prepare()");
  }
  const uint64_t attempted = core->windows.attempted(index);
  if (attempted == counted) {
    return false;
  }
  counted = attempted;
  if (read == 0) {
    read = core->windows.shared()->read;
    range = core->windows.shared()->range;
  }
  ++progress.steps;
  // A window of stand-ins, on a rank without more batches, only counts as a step.
  const GradientWindow* window = core->windows.of(index);
  const double samples = window == nullptr ? 0 : window->report().weight;
  const double weight = options.weigh_by_samples ? samples : samples > 0;
  for (double& sum : progress.own_weight) {
    sum += weight;
  }
  progress.group_weight += weight;
  return true;
}

// Gradients have been averaged so far, so all ranks are equal.
void LocalSGD::Impl::begin_local() {
  core->local.set_local(true);
  local = true;
  progress.averaged_at = progress.steps;
  std::ranges::fill(progress.own_weight, 0);
  progress.group_weight = 0;
  averager->reset_anchor();
  progress.learning_rate = learning_rate();
}

void LocalSGD::Impl::announce(Part part, int64_t fragment) {
  agree({.number = static_cast<uint64_t>(progress.rounds) + 1,
         .round = 1 + static_cast<int64_t>(part) + 4 * (fragment + 1)}); // join_round reads it
}

// What ranks inform each other of travels with the synchronisations: nothing else is sent.
WindowTotals LocalSGD::Impl::agree(WindowTotals mine) {
  WindowShared& shared = *core->windows.shared();
  mine.models = uint64_t{1} << index;
  mine.steps = shared.steps;
  mine.read = read;
  mine.range = range;
  mine.requests = shared.requests;
  control.start(mine);
  WindowTotals totals = control.wait();
  shared.requests &= ~mine.requests;
  shared.heard |= totals.requests;
  return totals;
}

// Note [Waiting]
// Ranks may make different numbers of steps: a batch without a backward makes none, and a loop over
// data that is not prepared may be shorter on a rank. A rank that waits takes part in the others'
// synchronisations. When all wait, they take the largest counts, so that the next synchronisations
// are due in the same step on every rank, and step their schedulers as often.
void LocalSGD::Impl::wait_for_peers() {
  for (;;) {
    try {
      for (;;) {
        const WindowTotals totals = agree({.finished = 1, .waits = true});
        if (totals.finished == core->run.world().world_size) {
          break;
        }
        if (totals.round == 0) {
          throw CommunicationError(detail::kLocalSGDWhere,
                                   "a rank evaluates or saves while others wait at the end",
                                   "evaluations and saves after the loop");
        }
        join_round(totals.round);
      }
      const at::Tensor most = at::tensor(clocks(), at::kLong);
      core->run.communicator()->all_reduce(most, ReduceOp::MAX, "steps of the ranks");
      take_clocks(most.const_data_ptr<int64_t>());
      return;
    } catch (const CommunicationError&) {
      if (!recover()) {
        throw;
      }
      if (ended) {
        return;
      }
    }
  }
}

std::vector<int64_t> LocalSGD::Impl::clocks() const {
  std::vector<int64_t> mine{progress.steps, progress.averaged_at, progress.finish_at};
  const std::vector<int64_t> ticks = core->optimizers.ticks();
  mine.insert(mine.end(), ticks.begin(), ticks.end());
  return mine;
}

void LocalSGD::Impl::take_clocks(const int64_t* most) {
  const size_t count = clocks().size();
  end_clocks.assign(most, most + count);
  ++ends;
  progress.steps = most[0];
  progress.averaged_at = most[1];
  progress.finish_at = most[2];
  core->optimizers.tick_until(most + 3);
}

void LocalSGD::Impl::join_round(int64_t code) {
  if (!local) {
    begin_local();
    return;
  }
  run(static_cast<Part>((code - 1) % 4), (code - 1) / 4 - 1);
}

void LocalSGD::Impl::run(Part part, int64_t fragment) {
  report_round(); // of the previous one, whose spread has arrived by now
  const auto start = Clock::now();
  if (part == Part::finish) {
    averager->finish();
    committed();
  } else if (part == Part::inner) {
    average_group();
  } else {
    begin_round(fragment, part == Part::start);
  }
  report.seconds += std::chrono::duration<double>(Clock::now() - start).count();
}

// One vote for each rank that has made a step since the last average, or its
// samples.
double LocalSGD::Impl::take_weight(int64_t fragment) {
  double weight = 0;
  for (size_t f = 0; f < progress.own_weight.size(); ++f) {
    if (fragment == Averager::kAll || fragment == static_cast<int64_t>(f)) {
      progress.taken_weight[f] += progress.own_weight[f];
      weight = std::max(weight, std::exchange(progress.own_weight[f], 0));
    }
  }
  return options.weigh_by_samples ? weight : (weight > 0 ? 1 : 0);
}

// Note [A round of a scope]
// Statistics are fetched first and set last, so that a synchronisation that fails leaves parameters
// and statistics unchanged. They are sent with the last fragment.
void LocalSGD::Impl::begin_round(int64_t fragment, bool delayed) {
  if (progress.learning_rate == 0) { // of a warm-up's first step
    progress.learning_rate = learning_rate();
  }
  const double weight = take_weight(fragment);
  const bool last = fragment == Averager::kAll || fragment + 1 == averager->fragments();
  if (last && !buffers->empty()) {
    buffers->reduce(weight);
  }
  if (last && options.moments == MomentPolicy::average) {
    moments->average(weight);
  }
  if (delayed) {
    averager->start(weight, progress.learning_rate, fragment);
    progress.finish_at = progress.steps + options.delay;
    close_round(fragment);
    return;
  }
  closing = fragment;
  averager->average(weight, progress.learning_rate, fragment);
  close_round(fragment);
  committed();
}

void LocalSGD::Impl::close_round(int64_t fragment) {
  closing = kNothing;
  if (fragment == Averager::kAll || fragment + 1 == averager->fragments()) {
    buffers->apply();
    last_learning_rate = std::exchange(progress.learning_rate, learning_rate());
  }
  if (fragment == Averager::kAll) {
    progress.averaged_at = progress.steps;
    progress.group_weight = 0;
  }
}

void LocalSGD::Impl::committed() {
  std::ranges::fill(progress.taken_weight, 0);
  progress.rounds += 1;
  unread = true;
}

void LocalSGD::Impl::average_group() {
  const double weight = taken_group_weight = std::exchange(progress.group_weight, 0);
  if (group_averager) {
    group_averager->average(options.weigh_by_samples ? weight : (weight > 0 ? 1 : 0));
  }
  taken_group_weight = 0;
  progress.inner_rounds += 1;
}

void LocalSGD::Impl::synchronize() {
  if (!active || !local) {
    return;
  }
  if (core->windows.in_window(index)) {
    throw InputError(detail::kLocalSGDWhere, "synchronize() in the middle of a window",
                     "a call between optimizer steps",
                     "call it where accelerator.sync_gradients() is true");
  }
  wait_for_peers();
  bool differ = progress.steps != progress.averaged_at;
  if (averager->started()) {
    make_round(Part::finish, Averager::kAll);
    differ = true; // other changes are each rank's own
    for (double& weight : progress.own_weight) {
      weight = std::max(weight, 1.0);
    }
  }
  if (differ) {
    make_round(Part::whole, Averager::kAll);
  }
}

void LocalSGD::Impl::report_round() {
  if (!unread) {
    return;
  }
  report.last = averager->report();
  unread = false;
  report.bytes += report.last.bytes;
  if (log_enabled(LogLevel::debug)) {
    std::ostringstream line;
    line << "local sgd: average " << progress.rounds << " at step " << progress.steps << ": spread "
         << report.last.spread << ", " << report.last.bytes << " bytes, " << report.last.seconds
         << " s";
    log(LogLevel::debug, line.str());
  }
  if (watch.grows(report.last, last_learning_rate) && core->run.world().rank == 0) {
    std::ostringstream line;
    line << "local sgd: the ranks diverge: the spread of their parameters "
            "has grown in each of the last averages, to "
         << report.last.spread << " (norm of the mean: " << report.last.norm
         << "). Average more often (local_sgd_steps=" << options.local_sgd_steps
         << " now) or lower the learning rate";
    log_warning(line.str());
  }
}

void LocalSGD::Impl::finish() {
  if (!active) {
    return;
  }
  synchronize();
  if (local) {
    finish_moments();
  }
  core->precision.take_smallest(); // the ranks skipped different steps
  active = false;
  report_round();
  core->local.close();
  close_groups();
  if (core->run.world().rank == 0 && progress.rounds > 0) {
    log_summary();
  }
}

} // namespace hasten
