#include <c10/util/accumulate.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "classifier.h"
#include "comm/shm/stages.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/text.h"
#include "hasten/flat/flat_layout.h"
#include "hasten/models/step_memory.h"
#include "hasten/optim/make_optimizer.h"
#include "hasten/tasks/task.h"
#include "run.h"

namespace hasten {

namespace detail {

/// Matrix products in 16 bits; parameters stay fp32.
bool has_16_bits(const EstimateMemoryCommand& command) {
  const Precision precision = command.arguments.effective_precision();
  return precision == Precision::bf16 || precision == Precision::fp16;
}

PreTrainedConfig config_of(const EstimateMemoryCommand& command) {
  if (!is_model_shape(command.model)) {
    return AutoConfig::from_pretrained(command.model);
  }
  PreTrainedConfig config = AutoConfig::from_shape(command.model, command.vocab_size);
  config.id2label.resize(static_cast<size_t>(command.num_labels));
  return config;
}

using Shapes = std::vector<std::vector<int64_t>>;

/// Shapes of a rank's shards.
Shapes shards_of(const Shapes& shapes, int64_t ranks) {
  Shapes shards = shapes;
  for (auto& shape : shards) {
    shape[0] = (shape[0] + ranks - 1) / ranks;
  }
  return shards;
}

int64_t numel_of(const Shapes& shapes) {
  return sum_of(shapes, [](const auto& shape) { return c10::multiply_integers(shape); });
}

int64_t padded_numel(const Shapes& shapes) {
  return sum_of(shapes, [](const auto& shape) {
    return flat_padded(c10::multiply_integers(shape), at::kFloat);
  });
}

/// The ranks that share one copy of a sharded model.
int64_t sharding_ranks(const EstimateMemoryCommand& command) {
  const int64_t size = command.arguments.shard_size;
  return command.strategy == "hsdp" && size > 0 ? size : command.nproc;
}

/// Bytes of the small parameters, unsharded: they are copied to be sent in one message.
int64_t copied_bytes(const Shapes& shards, int64_t ranks) {
  constexpr int64_t kAloneBytes = 256 << 10; // larger shards are sent without a copy
  return sum_of(shards, [&](const auto& shape) {
    const int64_t shard = 4 * c10::multiply_integers(shape);
    return shard < kAloneBytes ? ranks * shard : 0;
  });
}

/// The memory of a sharded model on the rank that needs most. The buffers of unsharded units and
/// of messages stay allocated between steps: the root, the running block and the next one (with
/// zero1 and zero2 all blocks), the largest unit's gradient, and copies of its small parameters
/// and gradients.
void add_shards(MemoryEstimate& estimate, const EstimateMemoryCommand& command,
                const PreTrainedConfig& config, const Shapes& block_shapes, const Shapes& shapes,
                const Shapes& trained, const OptimizerSettings& settings) {
  const bool copies_beside = command.strategy == "hsdp";
  const bool gathers = copies_beside || command.strategy == "fsdp";
  const int64_t ranks = sharding_ranks(command);
  const Shapes shards = shards_of(shapes, ranks);
  const int64_t rows = 4 * padded_numel(shards);
  const int64_t all = ranks * rows;
  const Shapes block_shards = shards_of(block_shapes, ranks);
  const int64_t block = ranks * 4 * padded_numel(block_shards);
  const int64_t root = all - config.num_hidden_layers * block;
  const int64_t blocks =
      gathers ? std::min<int64_t>(2, config.num_hidden_layers) : config.num_hidden_layers;
  estimate.parameters = rows + root + blocks * block / (has_16_bits(command) ? 2 : 1);
  const int64_t copies = copied_bytes(block_shards, ranks);
  if (gathers) { // parameters and gradients are sent at the same time
    estimate.parameters += copies;
  }
  const Shapes trained_shards = shards_of(trained, ranks);
  const int64_t trained_rows = 4 * padded_numel(trained_shards);
  estimate.gradients =
      trained_rows + copies + std::min(ranks * trained_rows, std::max(block, root));
  if (command.strategy == "zero1" && command.arguments.gradient_accumulation_steps > 1) {
    estimate.gradients += ranks * trained_rows;
  }
  estimate.optimizer_state =
      optimizer_state_bytes(spelling(command.arguments.optim), settings, trained_shards);
}

/// Bytes of all parameters as they are gathered, and of those that backward gathers again: of all
/// blocks but the last.
std::pair<int64_t, int64_t> gathered_bytes(const EstimateMemoryCommand& command,
                                           const PreTrainedConfig& config,
                                           const Shapes& block_shapes, int64_t parameters) {
  const int64_t block = padded_numel(block_shapes);
  const int64_t blocks = config.num_hidden_layers * block;
  const int64_t of_block = has_16_bits(command) ? 2 : 4;
  return {4 * (parameters - blocks) + of_block * blocks, of_block * (blocks - block)};
}

/// Bytes that a process sends in an optimizer step, with Local SGD in an average. An all-reduce sends
/// as much as a reduce-scatter and an all-gather.
int64_t sent_bytes(const EstimateMemoryCommand& command, const PreTrainedConfig& config,
                   const Shapes& block_shapes, int64_t parameters, int64_t gradient_bytes) {
  const int64_t batches = command.arguments.gradient_accumulation_steps;
  const int64_t all = command.nproc;
  const auto part = [](int64_t bytes, int64_t ranks) { return bytes / ranks * (ranks - 1); };
  const std::string& strategy = command.strategy;
  if (strategy == "ddp" || strategy == "local_sgd") {
    return 2 * part(gradient_bytes, all);
  }
  const auto [gathered, again] = gathered_bytes(command, config, block_shapes, parameters);
  if (strategy == "zero1" || strategy == "zero2") {
    return (strategy == "zero2" ? batches : 1) * part(gradient_bytes, all) + part(gathered, all);
  }
  const int64_t shards = sharding_ranks(command);
  return batches * part(gathered + again + gradient_bytes, shards) +
         2 * part(gradient_bytes / shards, all / shards);
}

/// Estimates the peak. It is in backward, from the second step on, when the optimizer's state
/// exists. A rank that reduces nothing and does not accumulate has no gradients in forward.
/// Gradients that are reduced have buffers. Local SGD has these buffers and a rank's own gradients.
MemoryEstimate estimate_of(const EstimateMemoryCommand& command) {
  const PreTrainedConfig config = config_of(command);
  const ModelTask head = find_task(command.task).head;
  const Shapes shapes = parameter_shapes(config, head);
  const auto lora = lora_config(command.lora);
  const at::ScalarType compute = has_16_bits(command) ? at::kBFloat16 : at::kFloat;
  const auto [trained, frozen_bytes] =
      lora ? lora_memory(config, *lora, compute, head) : LoraMemory{.trainable = shapes};
  MemoryEstimate estimate;
  estimate.parameter_count = numel_of(shapes);
  estimate.trainable_count = numel_of(trained);
  estimate.parameters = 4 * estimate.trainable_count + frozen_bytes;
  const int64_t padded = padded_numel(trained);
  const bool several = command.nproc > 1;
  const bool local = several && command.strategy == "local_sgd";
  // Gradients that are not reduced are autograd's tensors.
  const bool own = !several || local;
  const bool fresh = own && command.arguments.gradient_accumulation_steps == 1;
  OptimizerSettings settings;
  settings.args = command.arguments.optim_args;
  const int64_t buffers = several ? 4 * padded : 0;
  const int64_t own_gradients = own ? 4 * estimate.trainable_count : 0;
  estimate.gradients = buffers + own_gradients;
  estimate.optimizer_state =
      optimizer_state_bytes(spelling(command.arguments.optim), settings, trained);
  if (local) {
    estimate.averaging = 4 * command.arguments.averaging_copies() * estimate.trainable_count;
  }
  Shapes block;
  int64_t groups = several; // of ranks, each with memory through which a process sends
  if (several && !local && command.strategy != "ddp") {
    groups = command.strategy == "hsdp" ? 4 : 2;
    block = block_shapes(config);
    add_shards(estimate, command, config, block, shapes, trained, settings);
  }
  estimate.communication = groups * static_cast<int64_t>(Stages::kBytes);
  estimate.sent = sent_bytes(command, config, block, estimate.parameter_count, 4 * padded);
  const int64_t kept =
      estimate.parameters + estimate.optimizer_state + estimate.averaging + estimate.communication;
  if (command.rows == 0) {
    estimate.peak = kept + estimate.gradients;
    return estimate;
  }
  const StepMemory step = step_memory(config, command.rows, command.tokens,
                                      fresh ? GradientPlace::fresh : GradientPlace::existing,
                                      compute, head, lora ? &*lora : nullptr);
  estimate.activations = step.activation_bytes;
  if (fresh) { // the gradients that exist at the peak
    estimate.gradients = buffers + step.peak_bytes - step.activation_bytes;
  }
  estimate.peak = kept + estimate.gradients + step.activation_bytes;
  return estimate;
}

nlohmann::json estimate_json(const EstimateMemoryCommand& command, const MemoryEstimate& e) {
  return {{"model", command.model},
          {"task", command.task},
          {"parameter_count", e.parameter_count},
          {"trainable_count", e.trainable_count},
          {"optim", spelling(command.arguments.optim)},
          {"precision", has_16_bits(command) ? "bf16" : "fp32"},
          {"strategy", command.strategy},
          {"nproc", command.nproc},
          {"rows", command.rows},
          {"tokens", command.tokens},
          {"gradient_accumulation_steps", command.arguments.gradient_accumulation_steps},
          {"bytes",
           {{"parameters", e.parameters},
            {"gradients", e.gradients},
            {"optimizer_state", e.optimizer_state},
            {"averaging", e.averaging},
            {"communication", e.communication},
            {"activations", e.activations}}},
          {"peak_bytes", e.peak},
          {"host_peak_bytes", e.peak * command.nproc},
          {"sent_bytes", e.sent}};
}

void print_estimate(const EstimateMemoryCommand& command, const MemoryEstimate& e) {
  std::cout << command.model << ", " << format_count(e.parameter_count) << " parameters, "
            << (command.lora.r > 0 ? format_count(e.trainable_count) + " trained, " : "")
            << spelling(command.arguments.optim) << (has_16_bits(command) ? ", bf16" : "");
  if (command.nproc > 1) {
    std::cout << ", " << command.strategy << " on " << command.nproc << " processes";
  }
  std::cout << "\n";
  const auto line = [&](const std::string& what, int64_t bytes) {
    std::cout << "  " << std::left << std::setw(28) << what << " " << std::right << std::setw(12)
              << format_bytes(bytes) << "\n";
  };
  line("parameters", e.parameters);
  line("gradients", e.gradients);
  line("optimizer state", e.optimizer_state);
  if (e.averaging > 0) {
    line("averaging", e.averaging);
  }
  if (e.communication > 0) {
    line("communication", e.communication);
  }
  if (command.rows > 0) {
    line("activations, " + std::to_string(command.rows) + " x " + std::to_string(command.tokens),
         e.activations);
  }
  line("peak per process", e.peak);
  if (command.nproc > 1) {
    line("of " + std::to_string(command.nproc) + " processes", e.peak * command.nproc);
    line(command.strategy == "local_sgd" ? "sent in an average" : "sent in a step", e.sent);
  }
  std::cout << std::flush;
}

} // namespace detail

MemoryEstimate estimate_memory(const EstimateMemoryCommand& command) {
  return detail::estimate_of(command);
}

int run_command(const EstimateMemoryCommand& command) {
  const MemoryEstimate estimate = estimate_memory(command);
  if (command.json) {
    std::cout << detail::estimate_json(command, estimate).dump(2) << '\n';
  } else {
    detail::print_estimate(command, estimate);
  }
  return kExitOk;
}

} // namespace hasten
