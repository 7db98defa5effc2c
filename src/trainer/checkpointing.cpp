#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/activation_checkpoint/planner.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"
#include "training_run.h"

namespace hasten::detail {

std::vector<int64_t> longest_rows(const Dataset& data, int64_t count) {
  std::vector<int64_t> rows(static_cast<size_t>(data.size()));
  std::iota(rows.begin(), rows.end(), 0);
  count = std::min(count, data.size());
  std::partial_sort(rows.begin(), rows.begin() + count, rows.end(), [&](int64_t a, int64_t b) {
    return data.length(a) != data.length(b) ? data.length(a) > data.length(b) : a < b;
  });
  rows.resize(static_cast<size_t>(count));
  return rows;
}

void enable_checkpointing(TrainerParts& parts) {
  const GradientCheckpointing& how = parts.arguments.gradient_checkpointing;
  if (!how || gradient_checkpointing_enabled(parts.model)) {
    return;
  }
  if (how.mode() != GradientCheckpointing::Mode::budget) {
    parts.checkpointing = {.mode = how};
    gradient_checkpointing_enable(parts.model, *parts.checkpointing);
    return;
  }
  const Batch batch =
      parts.train->collate(longest_rows(*parts.train, parts.arguments.per_device_train_batch_size))
          .to(parts.accelerator->device());
  auto plan = enable_within_budget(
      parts.model,
      [&] {
        const Autocast autocast = parts.accelerator->autocast();
        const LossOutput loss = parts.loss_function(batch);
        require_loss(loss);
        return loss.loss_sum;
      },
      how);
  if (parts.accelerator->num_processes() > 1) { // measured times differ
    plan = std::make_shared<ActivationPlan>(ActivationPlan::from_json(
        parts.communicator().broadcast_object(plan->to_json(), "plan of activations")));
    gradient_checkpointing_enable(parts.model, {.plan = plan});
  }
  parts.checkpointing = {.plan = plan};
  plan_memory(memory_stats(parts.accelerator->device()).live_bytes + plan->predicted_peak_bytes);
  if (parts.is_main()) {
    log_info("gradient_checkpointing=" + how.text() + ": " + std::to_string(plan->regions.size()) +
             " regions over " + std::to_string(plan->blocks.size()) +
             " blocks, peak of activations " + format_bytes(plan->observed_peak_bytes) + " of " +
             format_bytes(plan->budget_bytes) + " on the longest batch");
  }
}

} // namespace hasten::detail
