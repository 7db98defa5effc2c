#include "hasten/config/training_plan.h"

#include <algorithm>
#include <cmath>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

/// A count of steps, or below 1 a fraction of `total`.
int64_t steps_of(double count_or_share, int64_t total) {
  const double steps = count_or_share < 1.0 ? std::ceil(count_or_share * static_cast<double>(total))
                                            : count_or_share;
  return static_cast<int64_t>(steps);
}

} // namespace detail

TrainingPlan make_training_plan(const TrainingArguments& arguments, int64_t batches_per_epoch,
                                int64_t step_shift) {
  if (batches_per_epoch < 1) {
    throw InputError("trainer::plan",
                     "the training data has no batch: batches=" + std::to_string(batches_per_epoch),
                     "at least one batch per rank",
                     "use more samples, a smaller per_device_train_batch_size, fewer "
                     "processes, or dataloader_drop_last=false");
  }
  TrainingPlan plan;
  plan.step_shift = step_shift;
  const int64_t window = arguments.gradient_accumulation_steps;
  plan.steps_per_epoch = (batches_per_epoch + window - 1) / window;
  if (arguments.max_steps > 0) {
    plan.max_steps = arguments.max_steps;
  } else {
    const double steps =
        std::ceil(arguments.num_train_epochs * static_cast<double>(plan.steps_per_epoch));
    if (!(steps <= static_cast<double>(kMaxSteps))) {
      throw InputError("trainer::plan",
                       "num_train_epochs=" + std::to_string(arguments.num_train_epochs) + " of " +
                           std::to_string(plan.steps_per_epoch) + " steps",
                       "at most " + std::to_string(kMaxSteps) + " steps in total");
    }
    plan.max_steps = static_cast<int64_t>(steps) - step_shift;
  }
  plan.max_steps = std::max<int64_t>(1, plan.max_steps);
  plan.epochs = (plan.max_steps + step_shift + plan.steps_per_epoch - 1) / plan.steps_per_epoch;
  const double warmup =
      arguments.warmup_steps > 0 ? arguments.warmup_steps : arguments.warmup_ratio;
  // A ratio of exactly 1 is a fraction, but warmup_steps = 1 is a count.
  plan.warmup_steps = arguments.warmup_steps <= 0 && warmup == 1.0
                          ? plan.max_steps
                          : detail::steps_of(warmup, plan.max_steps);
  if (plan.warmup_steps > plan.max_steps) {
    throw InputError("trainer::plan", "warmup_steps=" + std::to_string(plan.warmup_steps),
                     "at most the run's optimizer steps=" + std::to_string(plan.max_steps),
                     "use fewer steps of warm-up, or train longer");
  }
  const auto interval = [&](double steps) {
    return std::max<int64_t>(1, detail::steps_of(steps, plan.max_steps));
  };
  plan.logging_steps = interval(arguments.logging_steps);
  plan.eval_steps = interval(arguments.eval_steps);
  plan.save_steps = interval(arguments.save_steps);
  return plan;
}

int64_t times_after(const TrainingPlan& plan, IntervalStrategy strategy, int64_t steps,
                    int64_t done) {
  if (strategy == IntervalStrategy::no || done >= plan.max_steps) {
    return 0;
  }
  const bool by_epoch = strategy == IntervalStrategy::epoch;
  const int64_t every = by_epoch ? plan.steps_per_epoch : steps;
  const int64_t shift = by_epoch ? plan.step_shift : 0;
  const int64_t last = plan.max_steps + shift;
  return last / every - (std::max<int64_t>(done, 0) + shift) / every + (last % every != 0);
}

double seconds_for(std::initializer_list<WorkTime> kinds) {
  double seconds = 0;
  for (const WorkTime& kind : kinds) {
    if (kind.times > 0) {
      seconds += kind.seconds / static_cast<double>(kind.times) * static_cast<double>(kind.left);
    }
  }
  return seconds;
}

} // namespace hasten
