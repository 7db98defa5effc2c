#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/data/loader.h"
#include "hasten/trainer/resume.h"
#include "hasten/trainer/trainer.h"
#include "run.h"
#include "train_run.h"

namespace hasten::detail {

/// "at each epoch's end (3)", "every 50 steps (12)", "never".
std::string when_text(IntervalStrategy strategy, int64_t steps, const TrainingPlan& plan) {
  switch (strategy) {
    case IntervalStrategy::no:
      return "never";
    case IntervalStrategy::epoch:
      return "at each epoch's end: " + format_count(plan.epochs);
    case IntervalStrategy::steps:
      break;
  }
  return "every " + format_count(steps) +
         " steps and at the end: " + format_count((plan.max_steps + steps - 1) / steps);
}

/// The rate at the first step, the highest one and the last.
std::string rates_text(const TrainingArguments& a, const TrainingPlan& plan) {
  const Schedule schedule = make_schedule(a, plan);
  // In a long run only about a million steps are evaluated, and the first after the warm-up.
  int64_t highest = std::min(plan.warmup_steps, plan.max_steps - 1);
  const int64_t stride = 1 + plan.max_steps / 1'000'000;
  for (int64_t k = 0; k < plan.max_steps; k += stride) {
    highest = schedule(k) > schedule(highest) ? k : highest;
  }
  const auto rate = [&](int64_t k) {
    return format_digits(a.learning_rate * schedule(k)) + " at step " + format_count(k + 1);
  };
  std::string text = rate(0);
  if (highest > 0 && highest + 1 < plan.max_steps) {
    text += ", " + rate(highest);
  }
  return plan.max_steps > 1 ? text + ", " + rate(plan.max_steps - 1) : text;
}

std::string evaluation_text(const TrainingArguments& a, const Dataset* rows,
                            const TrainingPlan& plan) {
  if (rows == nullptr) {
    return "none: no evaluation data";
  }
  std::string text = when_text(a.eval_strategy, plan.eval_steps, plan) + ", on " +
                     format_count(rows->size()) + " samples";
  if (a.early_stopping_patience > 0) {
    text += "; training stops after " + format_count(a.early_stopping_patience) +
            " without a better " + a.best_metric_name();
    if (a.early_stopping_threshold > 0) {
      text += " (by more than " + format_digits(a.early_stopping_threshold) + ")";
    }
  }
  return text;
}

std::string saves_text(const TrainingArguments& a, const TrainingPlan& plan) {
  std::string text = a.save_strategy == SaveStrategy::best
                         ? "after each evaluation that is the best so far"
                         : when_text(interval_of(a.save_strategy), plan.save_steps, plan);
  if (a.save_strategy != SaveStrategy::no) {
    text +=
        a.save_total_limit > 0 ? ", " + format_count(a.save_total_limit) + " kept" : ", all kept";
    text += a.save_only_model ? ", only the model" : "";
  }
  return a.load_best_model_at_end
             ? text + "; the final model is the best by " + a.best_metric_name() + " (" +
                   (a.best_is_greater() ? "greater" : "smaller") + ")"
             : text;
}

void print_dry_run(const TrainCommand& command, const TrainInputs& in, int world_size) {
  const TrainingArguments& a = command.arguments;
  LoaderOptions options;
  options.batch_size = a.per_device_train_batch_size;
  options.drop_last = a.dataloader_drop_last;
  DataLoader loader(in.train, options);
  loader.shard(0, world_size);
  const TrainingPlan plan = make_training_plan(a, loader.size());
  const nlohmann::json arguments = a;
  const nlohmann::json defaults = TrainingArguments{};

  BannerLines lines = banner_facts(command, in, world_size);
  RunDescription description = describe_run(a, plan, *in.model, world_size);
  description.threads = threads_per_rank(world_size);
  description.device = "cpu or a GPU";
  std::ranges::move(run_lines(description), std::back_inserter(lines));
  lines.emplace_back(
      "optimizer",
      spelling(a.optim) + ", weight decay " + format_digits(a.weight_decay) +
          (a.max_grad_norm > 0 ? ", gradients clipped to norm " + format_digits(a.max_grad_norm)
                               : ", gradients not clipped"));
  lines.emplace_back("rate", a.lr_scheduler_type + ": " + rates_text(a, plan));
  lines.emplace_back("records", "every " + format_count(plan.logging_steps) + " steps");
  lines.emplace_back("evaluation", evaluation_text(a, in.eval.get(), plan));
  lines.emplace_back("saves", saves_text(a, plan));
  if (!a.gradient_checkpointing) {
    int64_t longest = 0; // tokens, after truncation
    for (int64_t row = 0; row < in.train->size(); ++row) {
      longest = std::max(longest, in.train->length(row));
    }
    EstimateMemoryCommand estimate = estimate_command(command, in, world_size);
    estimate.rows = a.per_device_train_batch_size;
    estimate.tokens = longest;
    lines.emplace_back("memory", "about " + format_bytes(estimate_memory(estimate).peak) +
                                     " of tensors per process on the longest samples (" +
                                     format_count(longest) + " tokens)");
  }
  lines.emplace_back("disk", "at most " + format_bytes(bytes_on_disk(a, *in.model)));
  const ResumePoint point = find_resume_point(a, /*verify_checksums=*/false);
  if (!point.folder.empty()) {
    lines.emplace_back("resume", "from " + point.folder.string());
  }
  for (const auto& [name, value] : arguments.items()) {
    if (value != defaults.at(name)) {
      lines.emplace_back("arguments", name + "=" + value.dump());
    }
  }
  std::cout << "Dry run: nothing is trained or written.\n";
  std::cout << joined(banner_text(lines, terminal_columns(STDOUT_FILENO)), "\n") << '\n'
            << std::flush;
}

} // namespace hasten::detail
