// A run of hasten train once its files are read, whatever its labels are.
// Private to src/cli.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "classifier.h"
#include "commands.h"
#include "hasten/data/dataset.h"
#include "hasten/trainer/progress_callback.h"

namespace hasten::detail {

/// Everything read, checked and tokenised; equal on all ranks.
struct TrainingInputs {
  std::shared_ptr<const Dataset> train{};
  std::shared_ptr<const Dataset> eval{}; // null without rows
  LoadedBert bert{};
  LossFunction loss{};
  ComputeMetrics metrics{};
  ModelFiles files{};
  /// Texts are cut to.
  int64_t max_length = 0;
  /// What the model learns, of the banner's title.
  std::string learns{};
  /// Behind "Model in FOLDER." when all is done.
  std::string hint{};
  /// Of data and model, for the banner; asked for on rank 0 alone, as is the next.
  std::function<BannerLines()> facts{};
  /// Of rows as the model sees them.
  std::function<std::string()> checksum{};
  std::vector<std::string> warnings{};
};

/// Reads the files for that many ranks. Local; touches nothing.
using ReadInputs = std::function<TrainingInputs(int world_size, bool is_main)>;

/// Prints the plan to stdout (--dry-run). Throws InputError where the arguments
/// contradict the number of updates, as the run would.
void print_dry_run(const TrainCommand& command, const TrainingInputs& in, int world_size);

/// Trains, or with --dry-run says the plan. The exit code.
int run_training(const TrainCommand& command, const ReadInputs& read);

} // namespace hasten::detail
