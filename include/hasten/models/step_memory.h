// Memory of a training step of any model, estimated with MemoryRehearsal.
// Threading: free functions.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "hasten/models/lora.h"
#include "hasten/models/pretrained_config.h"

namespace hasten {

/// Shapes of the model's parameters, in no particular order.
std::vector<std::vector<int64_t>> parameter_shapes(
    const PreTrainedConfig& config, ModelTask task = ModelTask::sequence_classification);

/// Shapes of the parameters of one block, the unit of a sharded model. Empty if the family has none.
std::vector<std::vector<int64_t>> block_shapes(const PreTrainedConfig& config);

/// Where a parameter's gradient goes in backward.
enum class GradientPlace {
  /// Backward's tensor becomes grad(): the first micro-batch after zero_grad, in a single process.
  fresh,
  /// Backward adds to an existing tensor: flat buffers, or a second micro-batch.
  existing,
};

/// Parameters of a model with an adapter. The frozen weights of linear layers are in compute_dtype.
struct LoraMemory {
  std::vector<std::vector<int64_t>> trainable{}; // shapes, fp32
  int64_t frozen_bytes = 0;
};
LoraMemory lora_memory(const PreTrainedConfig& config, const LoraConfig& lora,
                       c10::ScalarType compute_dtype = c10::ScalarType::Float,
                       ModelTask task = ModelTask::sequence_classification);

struct StepMemory {
  /// Peak in forward and backward of the summed loss, with `fresh` gradients. Parameters and
  /// `existing` gradients are not included.
  int64_t peak_bytes = 0;
  /// Part of peak_bytes that is activations and their gradients, without the parameters' gradients.
  int64_t activation_bytes = 0;
  /// Bytes that are saved for backward when forward ends.
  int64_t saved_bytes = 0;
};

/// Memory of a model with the head of `task` in training mode on the CPU, for a batch of shape
/// [rows, tokens] without padding, for causal_lm of several texts in each row. The batch's three int64
/// tensors (causal_lm: four) are included; libraries' scratch
/// memory is not. No activation checkpointing. `compute_dtype` is kFloat, or kBFloat16 for a forward
/// under Autocast with fp32 parameters. `lora`: the model has this adapter. Runs the step on tensors without memory.
/// Throws InputError if rows or tokens is below 1, tokens is above the model's maximum, or for
/// another compute_dtype.
StepMemory step_memory(const PreTrainedConfig& config, int64_t rows, int64_t tokens,
                       GradientPlace gradients,
                       c10::ScalarType compute_dtype = c10::ScalarType::Float,
                       ModelTask task = ModelTask::sequence_classification,
                       const LoraConfig* lora = nullptr);

} // namespace hasten
