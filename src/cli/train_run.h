// The input of hasten train, and what is printed about it. Private to src/cli.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "classifier.h"
#include "commands.h"
#include "hasten/data/dataset.h"
#include "hasten/text/token_cache.h"
#include "hasten/trainer/progress_callback.h"

namespace hasten::detail {

/// The input, read, checked and tokenized; equal on all ranks.
struct TrainInputs {
  const Task* task = nullptr;
  Head head = Head::single_label;
  TaskDataOptions options{};
  std::optional<TokenizedClassification> data{};
  std::shared_ptr<const Dataset> train{};
  std::shared_ptr<const Dataset> eval{}; // null without evaluation data
  /// Origin of the vocabulary, for the banner.
  std::string vocabulary{};
  /// Maximum number of tokens of a text.
  int64_t max_length = 0;
  PreTrainedModel model{nullptr};
  std::optional<LoraConfig> lora{};
};

/// Lines of the banner on data and model.
BannerLines banner_facts(const TrainCommand& command, const TrainInputs& in, int world_size);

/// Of the run, without activations.
EstimateMemoryCommand estimate_command(const TrainCommand& command, const TrainInputs& in,
                                       int world_size);

/// Maximum size of the output folder for this model, in bytes.
int64_t bytes_on_disk(const TrainingArguments& arguments, const torch::nn::Module& model);

/// Writes train_results.json, eval_results.json, all_results.json and the model card README.md into
/// the output folder, and prints the scores of each label. A README.md of the user stays.
/// Collective: it evaluates the final model if the last evaluation was of another one.
void leave_results(Trainer& trainer, const TrainCommand& command, const TrainInputs& in,
                   const TrainOutput& output);

/// Prints the plan to stdout (--dry-run). Throws InputError, as the run would, if the arguments
/// contradict the number of steps.
void print_dry_run(const TrainCommand& command, const TrainInputs& in, int world_size);

} // namespace hasten::detail
