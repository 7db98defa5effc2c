#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <string>
#include <unordered_set>
#include <vector>

#include "activation_checkpoint/block_regions.h"
#include "hasten/accelerator/find_batch_size.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/config/checkpoint_spec.h"
#include "hasten/core/memory.h"
#include "training_run.h"

namespace hasten::detail {

/// Bytes that training keeps in addition to parameters, gradients and activations.
int64_t kept_bytes(const TrainerParts& parts) {
  std::vector<std::vector<int64_t>> shapes;
  std::unordered_set<const void*> seen;
  int64_t weights = 0;
  at::ScalarType dtype = at::kFloat;
  for (const at::Tensor& parameter : parts.model->parameters()) {
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
      shapes.push_back(parameter.sizes().vec());
      weights += static_cast<int64_t>(parameter.nbytes());
      dtype = parameter.scalar_type();
    }
  }
  const TrainingArguments& a = parts.arguments;
  const bool averages = a.local_sgd_steps > 0 && parts.accelerator->num_processes() > 1;
  return optimizer_state_bytes(spelling(a.optim), optimizer_settings(a), shapes, dtype) +
         (averages ? (1 + a.averaging_copies()) * weights : 0); // buffers of gradients
}

/// The limit for all tensors of this process on the device, in bytes.
int64_t memory_limit_of(const TrainingArguments& a, const at::Device& device) {
  if (!a.memory_limit.empty()) {
    return parse_bytes(a.memory_limit);
  }
  return memory_share(device, a.device);
}

void find_batch_size(TrainerParts& parts, int64_t first) {
  TrainingArguments& a = parts.arguments;
  if (!a.auto_find_batch_size) {
    return;
  }
  install_memory_meter();
  enable_checkpointing(parts);
  Accelerator& accelerator = *parts.accelerator;
  const at::Device device = accelerator.device();
  const int64_t rows = a.per_device_train_batch_size * a.gradient_accumulation_steps;
  FindBatchSizeOptions options;
  options.starting_batch_size = first;
  options.effective_batch_size = rows;
  options.device = device;
  options.memory_limit_bytes = memory_limit_of(a, device);
  plan_memory(options.memory_limit_bytes);
  const int64_t kept = kept_bytes(parts);
  const int64_t size = find_executable_batch_size(
      [&](int64_t batch_size) {
        const auto put_back = c10::make_scope_exit(
            [&, training = parts.model->is_training()] { parts.model->train(training); });
        parts.model->train();
        const Untouched untouched(*parts.model, device);
        const at::Tensor reserved = at::empty({kept}, at::TensorOptions(device).dtype(at::kByte));
        const Batch batch = parts.train->collate(longest_rows(*parts.train, batch_size)).to(device);
        for (int i = 0; i < 2; ++i) { // the first step fills caches
          LossOutput loss;
          {
            const Autocast autocast = accelerator.autocast();
            loss = parts.loss_function(batch);
          }
          require_loss(loss);
          loss.loss_sum.backward();
        }
      },
      options, &accelerator);
  if (size == a.per_device_train_batch_size) {
    return;
  }
  if (parts.is_main()) {
    log_info("auto_find_batch_size: " + std::to_string(size) + " samples x " +
             std::to_string(rows / size) + " accumulation instead of " +
             std::to_string(a.per_device_train_batch_size) + " x " +
             std::to_string(a.gradient_accumulation_steps) +
             (options.memory_limit_bytes > 0
                  ? ", within " + format_bytes(options.memory_limit_bytes) + " per process"
                  : std::string()));
  }
  a.per_device_train_batch_size = size;
  a.gradient_accumulation_steps = rows / size;
  accelerator.set_gradient_accumulation_steps(rows / size);
}

} // namespace hasten::detail
