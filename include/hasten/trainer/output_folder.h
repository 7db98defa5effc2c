// The output folder of a run and its checkpoint-N folders.
// Without LibTorch. Threading: none needed. Local: rank 0 calls these.
//
//   output_dir/
//     metrics.jsonl          one JSON object per line, written immediately
//     checkpoint-N/          the training state after step N; complete or absent.
//                            Also a model folder: model, trainer_state.json,
//                            training_args.json and hasten_state.json, in addition
//                            to the files of hasten/state/saved_state.h
//     checkpoint-best        a link to the best checkpoint-N so far
//     *_results.json         what Trainer::save_metrics() wrote; hasten train writes
//                            train, eval and all
//     report.html            report_to=html: the report so far
//     README.md              (hasten train) a model card
//     …                      the final model's files, trainer_state.json,
//                            training_args.json and hasten_state.json
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "hasten/base/files.h"
#include "hasten/config/training_arguments.h"

namespace hasten {

/// The description of a run in its checkpoints and its finished folder.
inline constexpr const char* kRunFile = "hasten_state.json";
/// What report_to=html writes (hasten/report/report.h).
inline constexpr const char* kReportFile = "report.html";

/// The first file in `folder` that belongs to another run or a model: a checkpoint-N folder, a
/// record, weights. Empty if there is none. A folder that does not exist or has only other files is
/// free.
std::filesystem::path trace_of_a_run(const std::filesystem::path& folder);

/// Throws InputError unless output_dir is empty text, free, or overwrite_output_dir is set; also if
/// it is a file. Writes nothing.
void require_free_output_dir(const TrainingArguments& arguments);

/// Makes the folder and removes another run's checkpoint-N folders and records. Throws InputError
/// if the folder cannot be made. Throws Error if something in it cannot be removed, naming the path
/// and the reason.
void clear_output_dir(const std::filesystem::path& folder);

/// Holds a lock on a folder while it lives. The lock is on the folder itself, so it leaves no file.
/// The system releases it when the process ends, however it ends. It works between programs of this
/// library, also on several machines if the file system supports flock. Programs that do not take
/// the lock are not stopped.
class OutputDirLock {
 public:
  /// Makes the folder if it is missing. Empty text locks nothing. A folder that cannot be made or
  /// opened is not locked either; writing to it will fail. Throws InputError if another process holds
  /// the lock, naming it if it is on this machine. Waits for one that is ending.
  explicit OutputDirLock(const std::filesystem::path& folder);
  /// Removes the folder if the constructor made it and it is still empty.
  ~OutputDirLock();
  /// Throws Error if the folder was moved, removed or replaced since, because files written by its
  /// name would go elsewhere.
  void require_in_place() const;
  OutputDirLock(const OutputDirLock&) = delete;
  OutputDirLock& operator=(const OutputDirLock&) = delete;

 private:
  std::filesystem::path folder_;
  bool made_ = false;
  detail::FileDescriptor fd_{};
};

/// Throws what OutputDirLock would throw if the folder exists. Takes no lock and makes nothing.
void require_unlocked_output_dir(const std::filesystem::path& folder);

/// checkpoint-N folders by N, ascending.
struct CheckpointFolder {
  int64_t global_step = 0;
  std::filesystem::path path{};
};
std::vector<CheckpointFolder> checkpoint_folders(const std::filesystem::path& folder);

/// Makes folder/checkpoint-best a link to checkpoint-`step`, or removes it if there is no such
/// checkpoint. Makes none on a file system without links.
void link_best_checkpoint(const std::filesystem::path& folder, std::optional<int64_t> step);

/// Removes what killed writers left in the folder and next to it: files and checkpoints that are
/// incomplete or partly removed ("checkpoint-N.tmp-…"), and the unfinished final model
/// ("<folder>.tmp-…"). The caller must hold the folder's lock.
void remove_unfinished_saves(const std::filesystem::path& folder);

/// Removes the oldest until `limit` are left; 0 keeps all. Never removes the newest and
/// `best_step`'s, so with a limit of 1 two may stay. Returns the removed folders.
std::vector<std::filesystem::path> rotate_checkpoints(const std::filesystem::path& folder,
                                                      int64_t limit,
                                                      std::optional<int64_t> best_step);

/// Removes all checkpoint-N folders except `step`'s.
void keep_only_checkpoint(const std::filesystem::path& folder, int64_t step);

} // namespace hasten
