#include "dry_run.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>

#include "estimate_memory.h"
#include "hasten/base/json.h"
#include "hasten/base/progress_bar.h"
#include "hasten/base/world.h"
#include "hasten/data/loader.h"
#include "hasten/optim/make_schedule.h"
#include "hasten/optim/param_groups.h"
#include "hasten/trainer/resume.h"

namespace hasten::detail {

/// Shortest decimal that says it, at most 6 digits.
std::string plain(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

/// "at each epoch's end (3)", "every 50 updates (12)", "never".
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
         " updates and at the end: " + format_count((plan.max_steps + steps - 1) / steps);
}

/// The rate at the first update, the highest one and the last.
std::string rates_text(const TrainingArguments& a, const TrainingPlan& plan) {
  const Schedule schedule =
      make_schedule(nlohmann::json(a).at("lr_scheduler_type").get<std::string>(), plan.warmup_steps,
                    plan.max_steps, a.learning_rate, try_parse_json(a.lr_scheduler_kwargs).value);
  // Of a long run a million updates are looked at, and the one behind the warm-up.
  int64_t highest = std::min(plan.warmup_steps, plan.max_steps - 1);
  const int64_t stride = 1 + plan.max_steps / 1'000'000;
  for (int64_t k = 0; k < plan.max_steps; k += stride) {
    highest = schedule(k) > schedule(highest) ? k : highest;
  }
  const auto rate = [&](int64_t k) {
    return plain(a.learning_rate * schedule(k)) + " at update " + format_count(k + 1);
  };
  std::string text = rate(0);
  if (highest > 0 && highest + 1 < plan.max_steps) {
    text += ", " + rate(highest);
  }
  return plan.max_steps > 1 ? text + ", " + rate(plan.max_steps - 1) : text;
}

RunDescription description_of(const TrainCommand& command, const DryRun& run,
                              const TrainingPlan& plan) {
  const TrainingArguments& a = command.arguments;
  const auto numbers = [](const std::vector<at::Tensor>& tensors) {
    std::unordered_set<const void*> seen;
    int64_t count = 0;
    for (const at::Tensor& tensor : tensors) {
      count += seen.insert(tensor.unsafeGetTensorImpl()).second ? tensor.numel() : 0;
    }
    return count;
  };
  RunDescription d;
  d.train_rows = run.train->size();
  d.eval_rows = run.eval_rows;
  d.world_size = run.world_size;
  d.threads = threads_per_rank(run.world_size);
  d.batch_per_rank = a.per_device_train_batch_size;
  d.gradient_accumulation_steps = a.gradient_accumulation_steps;
  d.total_batch = d.batch_per_rank * d.gradient_accumulation_steps * run.world_size;
  d.local_sgd_steps = run.world_size > 1 ? a.local_sgd_steps : 0;
  d.plan = plan;
  const auto groups = decay_groups(*run.model, a.weight_decay);
  d.parameters = numbers(run.model->parameters());
  d.decayed_parameters = numbers(groups[0].params());
  d.trainable_parameters = d.decayed_parameters + numbers(groups[1].params());
  d.device = "cpu or a GPU";
  d.precision =
      a.effective_precision() == Precision::no ? "fp32" : precision_name(a.effective_precision());
  d.output_dir = a.output_dir;
  d.metrics_file = d.output_dir / "metrics.jsonl";
  d.arguments = a;
  return d;
}

std::string evaluation_text(const TrainingArguments& a, const DryRun& run,
                            const TrainingPlan& plan) {
  if (run.eval_rows == 0) {
    return "none: no rows to evaluate on";
  }
  std::string text = when_text(a.eval_strategy, plan.eval_steps, plan) + ", on " +
                     format_count(run.eval_rows) + " rows";
  if (a.early_stopping_patience > 0) {
    text += "; training ends after " + format_count(a.early_stopping_patience) +
            " without a better " + a.best_metric_name();
    if (a.early_stopping_threshold > 0) {
      text += " (by more than " + plain(a.early_stopping_threshold) + ")";
    }
  }
  return text;
}

std::string saves_text(const TrainingArguments& a, const TrainingPlan& plan) {
  std::string text = when_text(a.save_strategy, plan.save_steps, plan);
  if (a.save_strategy != IntervalStrategy::no) {
    text +=
        a.save_total_limit > 0 ? ", " + format_count(a.save_total_limit) + " kept" : ", all kept";
    text += a.save_only_model ? ", the model alone" : "";
  }
  return a.load_best_model_at_end
             ? text + "; the final model is the best by " + a.best_metric_name() + " (" +
                   (a.best_is_greater() ? "greater" : "smaller") + ")"
             : text;
}

EstimateMemoryCommand memory_question(const TrainCommand& command, const DryRun& run) {
  const TrainingArguments& a = command.arguments;
  EstimateMemoryCommand question;
  question.model = command.model;
  question.vocab_size = run.model->config().vocab_size;
  question.num_labels = run.model->config().num_labels();
  question.rows = a.per_device_train_batch_size;
  question.tokens = run.longest;
  question.gradient_accumulation_steps = a.gradient_accumulation_steps;
  question.optim = a.optim;
  question.optim_args = a.optim_args;
  question.bf16 = a.effective_precision() == Precision::bf16 ||
                  a.effective_precision() == Precision::fp16; // as many bytes
  question.shard_size = a.shard_size;
  question.strategy = a.local_sgd_steps > 0 ? "local_sgd" : strategy_name(a.strategy);
  question.nproc = run.world_size;
  return question;
}

void print_dry_run(const TrainCommand& command, const DryRun& run) {
  const TrainingArguments& a = command.arguments;
  LoaderOptions options;
  options.batch_size = a.per_device_train_batch_size;
  options.drop_last = a.dataloader_drop_last;
  DataLoader loader(run.train, options);
  loader.shard(0, run.world_size);
  const TrainingPlan plan = make_training_plan(a, loader.size());
  const nlohmann::json arguments = a;
  const nlohmann::json defaults = TrainingArguments{};

  BannerLines lines = run.facts;
  for (auto& line : run_lines(description_of(command, run, plan))) {
    lines.push_back(std::move(line));
  }
  lines.emplace_back("optimizer", arguments.at("optim").get<std::string>() + ", weight decay " +
                                      plain(a.weight_decay) + ", gradients clipped at " +
                                      (a.max_grad_norm > 0 ? plain(a.max_grad_norm) : "no norm"));
  lines.emplace_back(
      "rate", arguments.at("lr_scheduler_type").get<std::string>() + ": " + rates_text(a, plan));
  lines.emplace_back("records", "every " + format_count(plan.logging_steps) + " updates");
  lines.emplace_back("evaluation", evaluation_text(a, run, plan));
  lines.emplace_back("saves", saves_text(a, plan));
  if (!a.gradient_checkpointing) {
    lines.emplace_back(
        "memory", "about " + format_bytes(estimated_peak_bytes(memory_question(command, run))) +
                      " of tensors a process on the longest rows (" + format_count(run.longest) +
                      " tokens)");
  }
  lines.emplace_back("disk", "at most " + format_bytes(run.disk_bytes));
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
  std::string before;
  for (const auto& [name, text] : lines) {
    char label[24];
    std::snprintf(label, sizeof label, "  %-11s ", name == before ? "" : name.c_str());
    std::cout << label << text << "\n";
    before = name;
  }
  std::cout << std::flush;
}

} // namespace hasten::detail
