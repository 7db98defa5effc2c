// What can be refused before LibTorch is mapped: files and folders that are not
// there, an output folder that holds another run, a world inside a world.
// `hasten` calls these for a quick answer; `hasten-worker` calls them again,
// because under torchrun it may be started by itself.
// Local; read-only. Threading: free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "commands.h"
#include "hasten/base/world.h"

namespace hasten {

/// Throws InputError that names flag and path: a file that is missing, empty,
/// a folder or unreadable; a model that is neither a folder with config.json
/// nor a shape; an output folder that holds another run (unless
/// overwrite_output_dir, or resume_from_checkpoint finds its checkpoint there) or
/// cannot be written.
void check_inputs(const TrainCommand& command);
void check_inputs(const PredictCommand& command);
void check_inputs(const EvalCommand& command);
void check_inputs(const PlanCommand& command);
void check_inputs(const EstimateMemoryCommand& command);
void check_inputs(const CompareCommand& command);
/// A folder without state.json.
void check_inputs(const StateCommand& command);

/// Files as above; a tokenizer that is no folder; an output that cannot be one.
void check_inputs(const TokenizerCommand& command);

/// Flags that say what is learned from what, for the record of a run. An object.
nlohmann::json described_inputs(const TrainCommand& command);

/// True where auto or latest find that the run in the output folder came to its
/// end with these flags on `world_size` ranks, so that no rank need be started.
/// False where that takes a closer look.
bool is_finished_already(const TrainCommand& command, int world_size);
/// What there is to say then.
std::string finished_line(const TrainCommand& command);

/// Throws InputError naming --nproc and WORLD_SIZE where processes are asked for
/// inside a world of several, or for more than 16 processes a core without
/// `oversubscribe`. `command` is "train", "compare" or "launch".
void check_nproc(const std::string& command, int nproc, bool oversubscribe, const World& world);
/// Throws InputError where the file has fewer lines than `nproc`.
void check_lines(const std::string& train_file, int nproc);
/// The same for flags that say where the output of processes goes.
void check_logs_outside(const std::string& command, const LogsSpecs& logs, const World& world);

/// Throws InputError where the disk that holds (or will hold) `folder` has fewer
/// than `bytes` free; what the folder holds already counts as free.
void check_free_space(const std::filesystem::path& folder, int64_t bytes);

} // namespace hasten
