// How a run begins: afresh, or behind a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/trainer/output_folder.h"
#include "trainer_parts.h"

namespace hasten::detail {

/// The same on every rank.
struct RunStart {
  /// Empty: afresh.
  std::filesystem::path folder{};
  /// `folder` is output_dir's own: records there go on.
  bool own_folder = false;
  /// Nothing is left to do.
  bool finished = false;
  /// The checkpoint's hasten_state.json.
  nlohmann::json run{};
  /// Of that run; empty where it does not say.
  std::string precision{};
  std::vector<std::string> notes{};
  /// LoaderOptions::drop_batch; 0 unless the checkpoint says it.
  int64_t drop_batch = 0;
};

/// Rows of one update over all ranks.
int64_t total_batch(const TrainerParts& parts);

/// Rank 0's lock on the output folder; nothing on the others.
using OutputDirHold = std::unique_ptr<OutputDirLock>;

/// All ranks get an InputError where another run holds the folder. Collective.
OutputDirHold hold_output_dir(TrainerParts& parts);

/// Rank 0 looks and refuses; all ranks get the answer or an InputError.
/// Collective.
RunStart decide_start(TrainerParts& parts);

/// Rows of a micro-batch: the arguments', or the saved run's where it found its own.
int64_t first_batch_size(const TrainerParts& parts, const RunStart& start);

/// TrainingPlan::step_shift of a run that goes on from `start` with updates of
/// this size.
int64_t step_shift_of(const RunStart& start, const TrainingPlan& plan, const TrainerParts& parts,
                      int64_t epoch_rows);

} // namespace hasten::detail
