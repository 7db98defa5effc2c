#include "hasten/models/step_memory.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/autocast.h"
#include "hasten/core/memory.h"
#include "hasten/core/memory_rehearsal.h"
#include "hasten/models/auto_model.h"

namespace hasten {

namespace detail {

std::vector<std::vector<int64_t>> shapes_of(const std::vector<at::Tensor>& parameters) {
  return mapped(parameters, [](const at::Tensor& of) { return of.sizes().vec(); });
}

} // namespace detail

std::vector<std::vector<int64_t>> block_shapes(const PreTrainedConfig& config) {
  const MemoryRehearsal rehearsal;
  const auto blocks =
      model_from_config(config, ModelTask::sequence_classification, false)->blocks();
  return blocks.empty() ? std::vector<std::vector<int64_t>>()
                        : detail::shapes_of(blocks.back()->parameters());
}

std::vector<std::vector<int64_t>> parameter_shapes(const PreTrainedConfig& config, ModelTask task) {
  const MemoryRehearsal rehearsal;
  return detail::shapes_of(model_from_config(config, task, false)->parameters());
}

LoraMemory lora_memory(const PreTrainedConfig& config, const LoraConfig& lora,
                       at::ScalarType compute_dtype, ModelTask task) {
  const MemoryRehearsal rehearsal;
  PreTrainedModel model = model_from_config(config, task, false); // whole: blocks may differ
  get_peft_model(model.ptr(), lora);
  cast_frozen_weights(*model, compute_dtype);
  LoraMemory memory;
  for (const at::Tensor& parameter : model->parameters()) {
    if (parameter.requires_grad()) {
      memory.trainable.push_back(parameter.sizes().vec());
    } else {
      memory.frozen_bytes += static_cast<int64_t>(parameter.nbytes());
    }
  }
  return memory;
}

StepMemory step_memory(const PreTrainedConfig& config, int64_t rows, int64_t tokens,
                       GradientPlace gradients, at::ScalarType compute_dtype, ModelTask task,
                       const LoraConfig* lora) {
  if (compute_dtype != at::kFloat && compute_dtype != at::kBFloat16) {
    throw InputError("models::step_memory",
                     std::string("compute_dtype=") + c10::toString(compute_dtype),
                     "Float or BFloat16");
  }
  if (rows < 1 || tokens < 1 || tokens > config.max_tokens()) {
    throw InputError(
        "models::step_memory",
        "rows=" + std::to_string(rows) + ", tokens=" + std::to_string(tokens),
        "1 or more, and at most the model's " + std::to_string(config.max_tokens()) + " tokens");
  }
  const MemoryRehearsal rehearsal;
  PreTrainedModel model = model_from_config(config, task, false);
  if (lora != nullptr) {
    get_peft_model(model.ptr(), *lora);
    cast_frozen_weights(*model, compute_dtype);
  }
  StepMemory memory;
  int64_t before = 0;
  int64_t kept_gradients = 0;
  const auto note_peak = [&] {
    if (const int64_t peak = memory_stats().peak_bytes - before; peak > memory.peak_bytes) {
      memory.peak_bytes = peak;
      memory.activation_bytes = peak - kept_gradients;
    }
  };
  for (const at::Tensor& parameter : model->parameters()) {
    if (!parameter.requires_grad()) {
      continue;
    }
    if (gradients == GradientPlace::existing) {
      parameter.mutable_grad() = at::empty_like(parameter);
      continue;
    }
    parameter.register_hook([&](const at::Tensor& gradient) {
      note_peak();
      kept_gradients += static_cast<int64_t>(gradient.nbytes());
    });
  }
  before = memory_stats().live_bytes;
  reset_peak_memory();
  const at::Tensor ids = at::empty({rows, tokens}, at::kLong);
  const at::Tensor mask = at::empty_like(ids);
  const bool causal = task == ModelTask::causal_lm;
  const at::Tensor others = at::empty({causal ? 2 : 1, rows, tokens}, at::kLong); // of a batch
  at::Tensor loss;
  if (const Autocast autocast({.enabled = compute_dtype == at::kBFloat16}); causal) {
    loss =
        model->causal_loss({.input_ids = ids, .labels = mask, .position_ids = others[0]}).loss_sum;
  } else {
    const at::Tensor logits = model->forward({ids, mask}).logits.to(at::kFloat).flatten(0, -2);
    loss = at::cross_entropy_loss(logits, at::empty({logits.size(0)}, at::kLong), {},
                                  at::Reduction::Sum);
  }
  memory.saved_bytes = memory_stats().live_bytes - before;
  loss.backward();
  note_peak();
  return memory;
}

} // namespace hasten
