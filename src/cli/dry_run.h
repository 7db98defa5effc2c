// hasten train --dry-run: what a run would do, without doing any of it.
// Private to src/cli.
#pragma once

#include <memory>

#include "hasten/cli/commands.h"
#include "hasten/data/dataset.h"
#include "hasten/models/bert.h"
#include "hasten/trainer/progress_callback.h"

namespace hasten::detail {

/// What has been read for the run.
struct DryRun {
  int world_size = 1;
  BannerLines facts{}; // of data and model
  std::shared_ptr<const Dataset> train{};
  int64_t eval_rows = 0;
  BertForSequenceClassification model{nullptr};
  /// Of the longest training row, after it was cut.
  int64_t longest = 0;
  /// Most bytes that the output folder holds at once.
  int64_t disk_bytes = 0;
};

/// Prints the plan to stdout. Throws InputError where the arguments contradict the
/// number of updates, as the run would.
void print_dry_run(const TrainCommand& command, const DryRun& run);

} // namespace hasten::detail
