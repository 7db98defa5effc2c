// The part of hasten train after its files are read, for every kind of labels. Private to src/cli.
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

/// The input, read, checked and tokenized; equal on all ranks.
struct TrainingInputs {
  std::shared_ptr<const Dataset> train{};
  std::shared_ptr<const Dataset> eval{}; // null without evaluation data
  LoadedBert bert{};
  LossFunction loss{};
  ComputeMetrics metrics{};
  ModelFiles files{};
  /// Maximum number of tokens of a text.
  int64_t max_length = 0;
  /// Name of the training data for the banner's title.
  std::string learns{};
  /// Printed after "Model in FOLDER." at the end.
  std::string hint{};
  /// Lines of the banner on data and model. Only rank 0 calls this and the next.
  std::function<BannerLines()> facts{};
  /// Checksum of the tokenized samples.
  std::function<std::string()> checksum{};
  std::vector<std::string> warnings{};
};

/// Reads the files for a world of this size. Local; writes nothing but the token cache.
using ReadInputs = std::function<TrainingInputs(int world_size, bool is_main)>;

/// Prints the plan to stdout (--dry-run). Throws InputError, as the run would, if the arguments
/// contradict the number of steps.
void print_dry_run(const TrainCommand& command, const TrainingInputs& in, int world_size);

/// Trains, or with --dry-run prints the plan. Returns the exit code.
int run_training(const TrainCommand& command, const ReadInputs& read);

} // namespace hasten::detail
