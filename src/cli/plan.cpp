#include <iostream>
#include <nlohmann/json.hpp>

#include "classifier.h"
#include "hasten/activation_checkpoint/planner.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/files.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "run.h"

namespace hasten {

namespace detail {

/// The regions by the names of their blocks, one per line.
std::string plan_lines(const ActivationPlan& plan) {
  std::string text;
  for (const PlanRegion& region : plan.regions) {
    const auto name = [&](int64_t block) { return plan.blocks[static_cast<size_t>(block)]; };
    text += "  " + name(region.first);
    if (region.last - region.first > 1) {
      text += " to " + name(region.last - 1);
    }
    text += region.choice == BlockChoice::keep_ops ? ": keep products and attention\n"
                                                   : ": recompute\n";
  }
  return text.empty() ? "  keep everything\n" : text;
}

} // namespace detail

int run_command(const PlanCommand& command) {
  install_memory_meter();
  set_seed(42);
  const Task& task = find_task(command.task);
  PreTrainedModel model = model_from_pretrained(command.model, task.head);
  if (const auto lora = detail::lora_config(command.lora)) {
    get_peft_model(model.ptr(), *lora);
  }
  if (command.tokens > model->config().max_tokens()) {
    throw InputError(
        "cli::plan",
        "--batch=" + std::to_string(command.rows) + "x" + std::to_string(command.tokens),
        "at most the model's " + std::to_string(model->config().max_tokens()) +
            " tokens per sample");
  }
  const Batch batch = detail::made_up_batch(*model, command.rows, command.tokens);
  const LossFunction sum = task.loss(model, task.problem_types[0]);
  const auto loss = [&] { return sum(batch).loss_sum; };
  loss().backward(); // a warm-up for allocations and caches
  const ChainProfile profile = profile_activations(model.ptr(), loss);
  const auto plans = pareto_plans(profile);
  std::cout << pareto_table(profile, plans);
  if (!command.svg.empty()) {
    write_file_atomically(command.svg, pareto_svg(profile, plans));
  }
  if (command.budget) {
    const auto plan = enable_within_budget(model.ptr(), loss, command.budget);
    std::cout << "\nbudget " << format_bytes(plan->budget_bytes) << ": peak "
              << format_bytes(plan->observed_peak_bytes) << " observed, "
              << format_bytes(plan->predicted_peak_bytes) << " predicted\n"
              << detail::plan_lines(*plan);
    if (!command.json.empty()) {
      write_file_atomically(command.json, plan->to_json().dump(2) + "\n");
    }
  }
  std::cout << std::flush;
  return kExitOk;
}

} // namespace hasten
