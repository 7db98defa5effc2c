// Resuming a run: which checkpoint-N to use, whether the arguments are still the same, and how the
// output folder is prepared. Without LibTorch.
// Threading: none needed. Local: rank 0 calls these.
//
// resume_from_checkpoint=
//   ""        start from the beginning; an error if the folder holds another run
//   latest    the newest complete checkpoint-N of output_dir; an error if there is
//             none
//   auto      the same, but starts from the beginning if there is no checkpoint-N.
//                         One command line starts the run and resumes it
//   a path    that checkpoint-N, of this output_dir or of another run
// latest and auto do nothing if the run in output_dir is finished.
// Hosts with output folders of their own take the newest checkpoint-N whose files they have together, and
// the notes of the run say which host lacks a newer one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/config/training_arguments.h"

namespace hasten {

struct ResumePoint {
  /// The checkpoint-N to resume from; empty: start from the beginning.
  std::filesystem::path folder{};
  /// output_dir holds the final model of a finished run.
  bool finished = false;
  /// "checkpoint-12: reason" for newer checkpoints that were skipped.
  std::vector<std::string> skipped{};
};

/// A checkpoint that the hosts have looked at together, each on its own disk.
struct JudgedCheckpoint {
  std::filesystem::path folder{};
  /// Why no run can resume from it; empty: one can.
  std::string fault{};
};

/// Reads only. With `verify_checksums` it reads every file of the candidates, otherwise it compares
/// sizes. `judged`: the candidates, newest first, of hosts with folders of their own; these are not read.
/// Throws InputError for a path that is not a complete checkpoint, for latest without a checkpoint,
/// if there are checkpoints but none is complete (it never starts over them), and for auto in a
/// folder that holds a model but no run.
ResumePoint find_resume_point(const TrainingArguments& arguments, bool verify_checksums,
                              const std::vector<JudgedCheckpoint>* judged = nullptr);

namespace detail {

/// Empty if a run can resume from the folder.
std::string why_not_resumable(const std::filesystem::path& folder, bool verify_checksums);

} // namespace detail

/// The description of a run in a checkpoint-N or a finished folder.
struct SavedRun {
  /// training_args.json.
  nlohmann::json arguments{};
  /// hasten_state.json: epoch_index, epoch_rows_seen, total_batch, world_size, facts, …; also
  /// trainer_state.json's global_step and training_args.json's gradient_accumulation_steps.
  nlohmann::json run{};
};
/// Throws InputError naming the file and what is wrong with it.
SavedRun read_saved_run(const std::filesystem::path& folder);

struct ArgumentChange {
  std::string name{};
  /// As JSON.
  std::string before{};
  std::string now{};
  /// The run's results would differ from those of the original run.
  bool alters_trajectory = false;
};

/// Arguments that differ from `saved`, except those about where and how to resume. Batch size and
/// accumulation do not alter the trajectory; the samples of one step over all ranks do
/// (`total_batch` is the current value).
std::vector<ArgumentChange> changed_arguments(const SavedRun& saved, const TrainingArguments& now,
                                              int64_t total_batch);

/// "name: before -> now, …" of the changes that alter the trajectory, or of all.
std::string describe_changes(const std::vector<ArgumentChange>& changes, bool only_altering);

/// Throws InputError naming the changes that alter the trajectory, unless
/// `allowed`.
void require_same_trajectory(const std::filesystem::path& folder,
                             const std::vector<ArgumentChange>& changes, bool allowed);

/// Prepares output_dir to continue after its checkpoint of step `global_step`. It renames later
/// checkpoint-N folders (damaged, or of a run that is abandoned) to
/// "checkpoint-N.set-aside…", removes the marks of a finished run and the files of killed writers,
/// and cuts later records off metrics.jsonl. A checkpoint-best that leads to a renamed folder then
/// leads to `best_step`'s. Throws Error if something cannot be written.
void prepare_resumed_dir(const std::filesystem::path& output_dir, int64_t global_step,
                         std::optional<int64_t> best_step);

} // namespace hasten
