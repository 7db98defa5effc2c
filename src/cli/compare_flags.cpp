#include <algorithm>

#include "flags.h"

namespace hasten::detail {

/// A comma-separated list of any spellings of --strategy.
std::vector<Strategy> read_strategies(const FlagTable& flags, const std::string& text) {
  std::vector<Strategy> found;
  for (const std::string& name : split(text)) {
    Strategy strategy{};
    require_flag(flags, read_flag(name, strategy),
                 "--strategies=" + text + ": \"" + name + "\" is not a strategy",
                 flag_expectation<Strategy>(), flag_fix<Strategy>(name));
    require_flag(flags, std::find(found.begin(), found.end(), strategy) == found.end(),
                 "--strategies=" + text + ": " + name + " twice", "each strategy once");
    found.push_back(strategy);
  }
  return found;
}

void check_compared(const FlagTable& flags, const CompareCommand& command) {
  const auto& strategies = command.strategies;
  const TrainingArguments& arguments = command.arguments;
  require_flag(
      flags, command.nproc >= 2,
      "--nproc=" + std::to_string(command.nproc) + ": strategies differ only on several processes",
      "2 or more");
  require_shard_size(
      flags, arguments.shard_size,
      std::find(strategies.begin(), strategies.end(), Strategy::hsdp) != strategies.end(),
      command.nproc);
  require_flag(flags,
               arguments.gradient_checkpointing.mode() != GradientCheckpointing::Mode::budget,
               "--gradient-checkpointing=" + arguments.gradient_checkpointing.text() +
                   ": a budget needs a known batch size",
               "none, full, every:K or ops");
}

int64_t read_memory_limit(const FlagTable& flags, const std::string& text) {
  try {
    return text.empty() ? 0 : parse_bytes(text);
  } catch (const InputError&) {
    throw InputError(flags.where(), "--memory-limit=" + text,
                     "bytes above 0, e.g. 2G, 2GB or 512MiB");
  }
}

Command parse_compare(const CommandEntry& entry, std::vector<std::string> arguments) {
  complete_checkpointing(arguments);
  CompareCommand command;
  TrainingArguments& training = command.arguments;
  training.save_strategy = IntervalStrategy::no;
  std::string strategies = "ddp,zero2,fsdp";
  std::string memory_limit;
  FlagTable flags(entry,
                  {.usage = "--model MODEL [flags]",
                   .examples = {"hasten compare --model bert-mini --nproc 2 \\\n"
                                "    --strategies ddp,zero2,fsdp --memory-limit 2G"},
                   .notes = "Trains a classifier on synthetic samples on the CPU, with each "
                            "strategy in a separate world under the memory limit. Finds the "
                            "largest batch that fits, times it, and recommends a strategy."});
  flags.group("Model and batches");
  declare_folder_or_shape(flags, command.model);
  flags.value("--vocab-size", command.vocab_size, "PIECES", "vocabulary of a shape",
              NumberRange{2, kPieces.most});
  flags.value("--max-length", training.max_length, "TOKENS",
              "tokens of every sample; at most the model's limit");
  flags.value("--gradient-accumulation-steps", training.gradient_accumulation_steps, "N",
              "micro-batches per step");
  flags.value("--max-batch-size", command.max_batch_size, "SAMPLES",
              "largest micro-batch to try on a process", kBatchRows);
  flags.group("Processes");
  declare_processes(flags, command.nproc, command.oversubscribe);
  flags.value("--strategies", strategies, "NAME,...",
              "strategies to compare, as in hasten train --strategy");
  declare_shard_size(flags, training.shard_size);
  declare_backend(flags, training);
  flags.group("Training");
  flags.value("--memory-limit", memory_limit, "BYTES",
              "limit of tensor memory per process, e.g. 2G (default: 90 % of the free "
              "memory, divided by the processes)");
  declare_precision(flags, training);
  declare_checkpointing(flags, training);
  flags.value("--optim", training.optim, "NAME", "as in hasten train: adamw, sgd, lion");
  flags.value("--optim-args", training.optim_args, "ARGS", "name=value,name=value");
  flags.value("--steps", command.steps, "STEPS", "steps to time for each strategy",
              NumberRange{1, 1'000'000});
  flags.group("Output");
  flags.value("--json", command.json, "FILE", "write the results to FILE");
  flags.parse(std::move(arguments));
  command.strategies = read_strategies(flags, strategies);
  command.memory_limit_bytes = read_memory_limit(flags, memory_limit);
  check_compared(flags, command);
  check_backend(flags, training);
  if (training.shard_size > 0) {
    training.strategy = Strategy::hsdp; // shard_size is valid with hsdp only
  }
  validate_arguments(flags, training);
  return command;
}

} // namespace hasten::detail
