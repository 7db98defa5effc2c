// Going on with a run: which checkpoint-N, whether the arguments are still the
// same, and the output folder's part in it. Without LibTorch.
// Threading: none needed. Local: rank 0 calls these.
//
// resume_from_checkpoint=
//   ""        start afresh; a folder that holds another run is refused
//   latest    the newest complete checkpoint-N of output_dir; an error if there is
//             none
//   auto      the same; where there is no checkpoint-N at all, start afresh. One
//             command line for the first start and for every start after it
//   a path    that checkpoint-N, of this output_dir or of another run
// latest and auto do nothing where the run in output_dir is finished.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/trainer/training_arguments.h"

namespace hasten {

struct ResumePoint {
  /// The checkpoint-N to go on from; empty: there is none, start afresh.
  std::filesystem::path folder{};
  /// output_dir holds the final model of a run that came to its end.
  bool finished = false;
  /// "checkpoint-12: reason" of newer ones that were passed over.
  std::vector<std::string> skipped{};
};

/// Reads only. `verify_checksums`: reads every file of the candidates; else
/// compares sizes.
/// Throws InputError: a path that is no complete checkpoint, latest without one,
/// checkpoints of which none is complete (never a fresh start over them), auto in
/// a folder that holds a model but no run.
ResumePoint find_resume_point(const TrainingArguments& arguments, bool verify_checksums);

/// What a checkpoint-N or a finished run says of itself.
struct SavedRun {
  /// training_args.json.
  nlohmann::json arguments{};
  /// hasten_state.json: global_step, epoch_index, epoch_rows_seen, total_batch,
  /// world_size, facts, ….
  nlohmann::json run{};
};
/// Throws InputError naming the file and what is wrong with it.
SavedRun read_saved_run(const std::filesystem::path& folder);

struct ArgumentChange {
  std::string name{};
  /// As JSON.
  std::string before{};
  std::string now{};
  /// The run would not be the one that was begun.
  bool alters_trajectory = false;
};

/// Arguments that differ from `saved`, those that say where and how to resume left
/// out. Batch size and accumulation alter nothing by themselves: what counts is
/// the rows of one update over all ranks, `total_batch` now.
std::vector<ArgumentChange> changed_arguments(const SavedRun& saved, const TrainingArguments& now,
                                              int64_t total_batch);

/// "name: before -> now, …" of those that alter the trajectory, or of all.
std::string describe_changes(const std::vector<ArgumentChange>& changes, bool only_altering);

/// Throws InputError naming the changes that alter the trajectory, unless
/// `allowed`.
void require_same_trajectory(const std::filesystem::path& folder,
                             const std::vector<ArgumentChange>& changes, bool allowed);

/// Makes output_dir ready to go on behind update `global_step` of its own
/// checkpoint: later checkpoint-N folders (damaged, or of a course that is left)
/// are renamed to "checkpoint-N.set-aside…", the marks of a finished run and what
/// killed writers left are removed, records behind that update are cut off
/// metrics.jsonl. Throws Error where something cannot be written.
void prepare_resumed_dir(const std::filesystem::path& output_dir, int64_t global_step);

} // namespace hasten
