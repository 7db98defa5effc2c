// Checks that need no LibTorch: missing files and folders, an output folder that holds another
// run, a world inside another launcher's world. `hasten` calls them before it starts
// `hasten-worker`. The worker repeats those of train, because torchrun may start it directly.
// Local; read-only. Threading: free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "commands.h"
#include "hasten/base/world.h"

namespace hasten {

/// Throws InputError with flag and path for: a file that is missing, empty, a folder or
/// unreadable; a model that is neither a folder with config.json nor a shape; an output folder
/// that cannot be written or holds another run (unless overwrite_output_dir is set or
/// resume_from_checkpoint finds a checkpoint there); fewer lines than processes. `fetched`: false
/// leaves out what needs the files of --model and --tokenizer.
void check_inputs(const TrainCommand& command, bool fetched = true);
void check_inputs(const PredictCommand& command, bool fetched = true);
void check_inputs(const GenerateCommand& command, bool fetched = true);
void check_inputs(const EvalCommand& command, bool fetched = true);
void check_inputs(const PlanCommand& command);
void check_inputs(const EstimateMemoryCommand& command);
void check_inputs(const CompareCommand& command, bool fetched = true);
/// For a folder without state.json.
void check_inputs(const StateCommand& command);

/// For a folder that is no adapter, and an output folder that is not empty.
void check_inputs(const MergeCommand& command, bool fetched = true);

/// For files as above, a tokenizer that is not a folder, and an output that cannot be a folder.
void check_inputs(const TokenizerCommand& command, bool fetched = true);

/// The flags that define model and data, for the record of a run. A JSON object.
nlohmann::json described_inputs(const TrainCommand& command);

/// True if auto or latest find that the run in the output folder is finished, with these flags
/// on `world_size` ranks; then no rank needs to be started. False if only the ranks can know.
bool is_finished_already(const TrainCommand& command, int world_size);
/// The message for this case.
std::string finished_line(const TrainCommand& command);

/// What must be the same on all hosts of a run: its flags, but those that belong to a host. Ranks
/// compare the contents of files.
std::map<std::string, std::string> facts_of_run(const TrainCommand& command);

/// Throws InputError naming --nproc and WORLD_SIZE inside the world of another launcher, and for
/// more than 16 processes per core without `oversubscribe`. `command` is "train", "compare" or
/// "launch".
void check_nproc(const std::string& command, int nproc, bool oversubscribe, const World& world);
/// Throws InputError if the files (matching_files) have fewer lines than `nproc`.
void check_lines(const std::string& train_file, int nproc);
/// Throws InputError for flags of signals and of output inside the world of another launcher.
void check_launch_outside(const std::string& command, const ProcessFlags& processes,
                          const World& world);

/// Throws InputError if the disk of `folder` has fewer than `bytes` free. Files that are already
/// in the folder count as free space.
void check_free_space(const std::filesystem::path& folder, int64_t bytes);

} // namespace hasten
