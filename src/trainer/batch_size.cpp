#include <ATen/ATen.h>

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hasten/accelerator/find_batch_size.h"
#include "hasten/base/host_memory.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/config/checkpoint_spec.h"
#include "hasten/core/memory.h"
#include "hasten/loader/loader_state.h"
#include "training_run.h"

namespace hasten::detail {

/// Puts a model into training mode with zero gradients, as after the first window. The destructor
/// restores mode, buffers, gradients and random states.
class TrialState {
 public:
  // Delegates, so that the destructor runs if an allocation fails here.
  TrialState(torch::nn::Module& model, const at::Device& device)
      : TrialState(model, device, random_states(device)) {
    model.train();
    for (const at::Tensor& buffer : model.buffers()) {
      buffers_.emplace_back(buffer, buffer.detach().clone());
    }
    for (const at::Tensor& parameter : model.parameters()) {
      if (parameter.requires_grad()) {
        at::Tensor zeros = at::zeros_like(parameter);
        gradients_.emplace_back(parameter, parameter.grad());
        at::Tensor(parameter).mutable_grad() = std::move(zeros);
      }
    }
  }
  TrialState(const TrialState&) = delete;
  TrialState& operator=(const TrialState&) = delete;
  ~TrialState() {
    for (auto entry = gradients_.rbegin(); entry != gradients_.rend(); ++entry) {
      entry->first.mutable_grad() = entry->second; // of a tied parameter the first entry counts
    }
    const at::NoGradGuard no_grad;
    for (auto& [buffer, value] : buffers_) {
      buffer.copy_(value);
    }
    set_random_states(device_, random_);
    model_.train(training_);
  }

 private:
  TrialState(torch::nn::Module& model, const at::Device& device, std::vector<at::Tensor> random)
      : model_(model),
        training_(model.is_training()),
        device_(device),
        random_(std::move(random)) {}

  torch::nn::Module& model_;
  bool training_;
  at::Device device_;
  std::vector<at::Tensor> random_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_{};
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_{};
};

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
         (averages ? 2 * weights : 0); // snapshot; buffers of gradients
}

/// The limit for all CPU tensors of this process, in bytes.
int64_t memory_limit_of(const TrainingArguments& a) {
  if (!a.memory_limit.empty()) {
    return parse_bytes(a.memory_limit);
  }
  const int64_t left = available_memory_bytes();
  const int ranks = world_from_environment().local_world_size;
  return left == 0 ? 0 : memory_stats().live_bytes + left / 10 * 9 / ranks;
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
  const int64_t limit = memory_limit_of(a);
  options.memory_limit_bytes = device.is_cpu() ? limit : 0;
  const int64_t kept = kept_bytes(parts);
  const int64_t size = find_executable_batch_size(
      [&](int64_t batch_size) {
        const TrialState state(*parts.model, device);
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
             (options.memory_limit_bytes > 0 ? ", within " + format_bytes(limit) + " per process"
                                             : std::string()));
  }
  a.per_device_train_batch_size = size;
  a.gradient_accumulation_steps = rows / size;
  accelerator.set_gradient_accumulation_steps(rows / size);
}

} // namespace hasten::detail
