// How a run begins: from the beginning, or from a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/trainer/output_folder.h"
#include "trainer_parts.h"

namespace hasten::detail {

/// The same on every rank, but for the name of a host's own folder.
struct StartingPoint {
  /// The checkpoint; empty: from the beginning.
  std::filesystem::path folder{};
  /// `folder` is in output_dir: the records there are continued.
  bool own_folder = false;
  /// The run is already finished.
  bool finished = false;
  /// SavedRun::run of the checkpoint.
  nlohmann::json run{};
  /// Precision of that run; empty if unknown.
  std::string precision{};
  std::vector<std::string> notes{};
  /// LoaderOptions::drop_batch; 0 unless the checkpoint has it.
  int64_t drop_batch = 0;
};

/// Samples of one step over all ranks.
int64_t total_batch(const TrainerParts& parts);

/// Locks the output folder on rank 0, and on each host that has its own; sets parts.folders. Throws
/// InputError on all ranks if another run holds it. Collective.
void lock_output_dir(TrainerParts& parts);

/// Rank 0 decides; all ranks get its decision or an InputError. Collective.
StartingPoint decide_starting_point(TrainerParts& parts);

/// The micro-batch size to try first: the arguments', or, with auto_find_batch_size, that of the
/// saved run.
int64_t first_batch_size(const TrainerParts& parts, const StartingPoint& start);

/// TrainingPlan::step_shift of a run that resumes from `start` with steps of this size.
int64_t step_shift_of(const StartingPoint& start, const TrainingPlan& plan,
                      const TrainerParts& parts, int64_t epoch_rows);

} // namespace hasten::detail
