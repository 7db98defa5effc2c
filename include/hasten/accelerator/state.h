// What a saved state of an Accelerator is and how it is written and read.
//
//   folder/
//     model.safetensors       model 0's parameters and buffers by name;
//                             model_1.safetensors, …: further models
//     state.safetensors       moments of optimizers by parameter name, tensors of
//                             registered objects, gradients of a complete window
//     state.json              everything that is no tensor
//     state_rank_0.safetensors … one a rank: torch's generators, position in the
//                             data, gradients of a window that is not complete; of
//                             sharded models its rows of parameters and moments,
//                             "sharded.<name>", which state.json lists
//     manifest.json           sizes and checksums; the last thing to be there
//
// Size, for parameters of P bytes with Adam: 3 P. Gradients that are not zero
// when it is saved add P; in the middle of a window P a rank. Generators: 5 KB a
// rank (+ 16 B a GPU).
//
// A resumed run equals the uninterrupted one bit for bit if the world has the same
// size. Otherwise: model, optimizers, schedulers and shared objects are the same,
// the epoch goes on behind the rows that were seen, and each rank's generator is
// seeded anew from (seed, rank, windows done). What then has no meaning is an
// error: an open window, objects saved per rank, a range that deals itself
// without a cursor. Each rank reads the rows it needs, whoever wrote them: a state of
// sharded models is loaded under any strategy, and one of whole models by sharded ones.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>

namespace hasten {

struct SaveStateOptions {
  /// Writes further files into the folder in the making, before anything else.
  /// One rank calls it: the main process. A model.safetensors that it writes and
  /// that holds model 0's values is not written a second time.
  std::function<void(const std::filesystem::path& folder)> also_write{};
  /// Replaces a folder that holds something else than a state, too.
  bool replace_any = false;
};

struct LoadStateOptions {
  /// Reads every file once more for its checksum, on one rank. False where
  /// verify_manifest() was called before.
  bool verify_checksums = true;
};

struct LoadedState {
  /// World size of the run that saved it.
  int world_size = 1;
  /// Windows completed by then.
  uint64_t windows = 0;
};

/// Whose values of a registered object a state holds.
enum class StateScope {
  /// The main process's; every rank loads them.
  shared,
  /// Each rank's own. Cannot be loaded at another world size.
  per_rank,
};

/// Names of the files in a state's folder.
inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kStateTensorsFile = "state.safetensors";

/// What a folder holds, from state.json and the files' headers: "world_size",
/// "strategy", "windows_completed", "optimizers" (their kinds) and "tensors", an array
/// of {"name", "dtype", "shape", "rows": [[rank, first, rows], …] or null}. Local.
/// Throws InputError naming the file that is missing or is none of a state.
nlohmann::json describe_state(const std::filesystem::path& folder);

/// Writes a model's parameters and buffers, whole, into one safetensors file, from the
/// rows that each rank saved. Verifies checksums first. Local.
/// Memory: what is put together of rows; whole tensors are mapped.
/// Throws InputError naming the file that is missing or damaged; `file` is as it was.
void consolidate_state(const std::filesystem::path& folder, const std::filesystem::path& file,
                       int64_t model = 0);

} // namespace hasten
