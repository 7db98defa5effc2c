// What a training step of BERT takes, from a MemoryRehearsal of one.
// Threading: free functions.
#pragma once

#include <cstdint>
#include <vector>

#include "hasten/models/bert.h"

namespace hasten {

/// Shapes of BertForSequenceClassification's parameters, in no particular order.
std::vector<std::vector<int64_t>> bert_parameter_shapes(const BertConfig& config);

/// Shapes of one of its layers' parameters: what a block of a sharded model holds.
std::vector<std::vector<int64_t>> bert_layer_shapes(const BertConfig& config);

/// Where a parameter's gradient goes in backward.
enum class GradientPlace {
  /// It becomes grad(): the first micro-batch behind a zero_grad, in a process alone.
  fresh,
  /// Into memory that is there already: flat buffers, or a second micro-batch.
  existing,
};

struct BertStepMemory {
  /// Most bytes at once in forward and backward of the summed loss, gradients that
  /// are `fresh` among them; beyond parameters and what is `existing`.
  int64_t peak_bytes = 0;
  /// Of these at that time: what is neither a gradient that stays nor on its way
  /// into one: activations and their gradients.
  int64_t activation_bytes = 0;
  /// Kept for backward when forward ends.
  int64_t saved_bytes = 0;
};

/// Of BertForSequenceClassification in training mode on the CPU, for a batch
/// [rows, tokens] without padding, its three int64 tensors among it; no activation
/// checkpointing. `compute_dtype`: kFloat, or kBFloat16 for a forward under Autocast
/// with fp32 parameters. Runs the step on tensors
/// without memory. Not in it: scratch memory of libraries. Throws InputError for rows or tokens below 1,
/// tokens above the model's and other types.
BertStepMemory bert_step_memory(const BertConfig& config, int64_t rows, int64_t tokens,
                                GradientPlace gradients,
                                c10::ScalarType compute_dtype = c10::ScalarType::Float);

} // namespace hasten
