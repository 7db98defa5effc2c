// The folder of a run: whether it is free, and its checkpoint-N folders.
// Without LibTorch. Threading: none needed. Local: rank 0 calls these.
//
//   output_dir/
//     metrics.jsonl          one JSON object a line, written through at once
//     checkpoint-N/          the training state after update N; complete or absent.
//                            Also a model folder: model, trainer_state.json,
//                            training_args.json, hasten_state.json beside the
//                            files of hasten/accelerator/state.h
//     run_config.json        (hasten train) the run's command line: hasten train
//                            --config of it repeats the run; in checkpoints, too
//     …                      the final model's files, trainer_state.json,
//                            training_args.json and hasten_state.json
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "hasten/trainer/training_arguments.h"

namespace hasten {

/// What a run says of itself, in its checkpoints and its finished folder.
inline constexpr const char* kRunFile = "hasten_state.json";

/// The first thing in `folder` that shows another run or a model: a
/// checkpoint-N folder, a record, weights. Empty where there is none; a folder
/// that does not exist is free, and so is one with other files in it.
std::filesystem::path trace_of_a_run(const std::filesystem::path& folder);

/// Throws InputError unless output_dir is empty text, free, or
/// overwrite_output_dir is set; also where it is a file. Writes nothing.
void require_free_output_dir(const TrainingArguments& arguments);

/// Makes the folder and removes another run's checkpoint-N folders and records.
/// Throws InputError where the folder cannot be made, Error where something in it
/// cannot be removed, naming the path and the reason.
void clear_output_dir(const std::filesystem::path& folder);

/// The right to write into a folder, held while it lives: a lock on the folder itself,
/// so that no file of it is left, and that the system takes back when the process
/// ends, however it does. It keeps programs of this library apart, also on several
/// machines where the file system knows flock; who does not ask is not held back.
class OutputDirLock {
 public:
  /// Makes the folder where it is missing. Empty text locks nothing, and so does a
  /// folder that cannot be made or opened: writing will say so.
  /// Throws InputError at once where another holds it, naming its process if that
  /// is on this machine.
  explicit OutputDirLock(const std::filesystem::path& folder);
  /// Removes the folder again where it was made here and is still empty.
  ~OutputDirLock();
  /// Throws Error where the folder was moved, removed or replaced since: what is
  /// written by its name would land elsewhere.
  void require_in_place() const;
  OutputDirLock(const OutputDirLock&) = delete;
  OutputDirLock& operator=(const OutputDirLock&) = delete;

 private:
  std::filesystem::path folder_;
  bool made_ = false;
  int fd_ = -1;
};

/// Throws what OutputDirLock would, where the folder exists; takes and makes nothing.
void require_unlocked_output_dir(const std::filesystem::path& folder);

/// checkpoint-N folders by N, ascending.
struct CheckpointFolder {
  int64_t global_step = 0;
  std::filesystem::path path{};
};
std::vector<CheckpointFolder> checkpoint_folders(const std::filesystem::path& folder);

/// Removes what writers that were killed left, in the folder and beside it: files
/// and checkpoints in the making or half removed ("checkpoint-N.tmp-…"), and the
/// model of the run's end ("<folder>.tmp-…"). For whoever holds the folder's lock.
void remove_unfinished_saves(const std::filesystem::path& folder);

/// Removes the oldest until `limit` are left; 0 keeps all. The newest and
/// `best_step`'s are never removed, so that with a limit of 1 two may stay.
/// Returns what was removed.
std::vector<std::filesystem::path> rotate_checkpoints(const std::filesystem::path& folder,
                                                      int64_t limit,
                                                      std::optional<int64_t> best_step);

/// Removes all checkpoint-N folders but `step`'s, if that one is there.
void keep_only_checkpoint(const std::filesystem::path& folder, int64_t step);

} // namespace hasten
