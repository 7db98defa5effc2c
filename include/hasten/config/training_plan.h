// The plan of a run: counts of steps, computed from the arguments and the number of batches.
// Without LibTorch.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "hasten/config/schedule.h"
#include "hasten/config/training_arguments.h"

namespace hasten {

/// Maximum number of steps of a run.
inline constexpr int64_t kMaxSteps = 1'000'000'000'000;

/// Steps are optimizer steps; epochs are counted from 0.
struct TrainingPlan {
  /// Steps of one pass over the data, >= 1.
  int64_t steps_per_epoch = 1;
  /// Steps of the run.
  int64_t max_steps = 1;
  /// Epochs that the run begins; the last one may be incomplete.
  int64_t epochs = 1;
  /// Steps during the warm-up of the learning rate.
  int64_t warmup_steps = 0;
  /// Steps between two training records, evaluations, saves; >= 1.
  int64_t logging_steps = 1;
  int64_t eval_steps = 1;
  int64_t save_steps = 1;
  /// global_step + step_shift is the number of steps if all of them had had this plan's batch.
  /// Not 0 only after a run was resumed with another total batch.
  int64_t step_shift = 0;
};

/// `batches_per_epoch`: micro-batches of one rank (DataLoader::size()), >= 1. steps_per_epoch =
/// ceil(batches / accumulation), max_steps = ceil(num_train_epochs * steps_per_epoch) unless
/// given; fractions are rounded up. Throws InputError for fewer than 1 batch, a warm-up above
/// max_steps, and more than kMaxSteps.
TrainingPlan make_training_plan(const TrainingArguments& arguments, int64_t batches_per_epoch,
                                int64_t step_shift = 0);

/// The arguments' schedule for the plan's steps. Throws as the other make_schedule() does.
Schedule make_schedule(const TrainingArguments& arguments, const TrainingPlan& plan);

/// How often an evaluation or save of the strategy is due after step `done` until the run's end,
/// its last step included. `steps`: between two with IntervalStrategy::steps.
int64_t times_after(const TrainingPlan& plan, IntervalStrategy strategy, int64_t steps,
                    int64_t done);

/// A part of a run's work: how often it was done, in how many seconds, and how often it is still to
/// be done.
struct WorkTime {
  int64_t times = 0;
  double seconds = 0;
  int64_t left = 0;
};

/// Seconds for what is left, each at the mean of its kind. A kind that was not measured yet counts
/// 0.
double seconds_for(std::initializer_list<WorkTime> kinds);

} // namespace hasten
