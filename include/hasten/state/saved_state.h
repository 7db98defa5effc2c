// The files of a saved state of an Accelerator, and functions that read them.
//
//   folder/
//     model.safetensors       model 0's parameters and buffers by name; model_1.safetensors, … are
//                             those of further models
//     state.safetensors       optimizers' moments by parameter name, tensors of registered objects,
//                             gradients of a complete window
//     state.json              everything that is not a tensor
//     state_rank_0.safetensors … one per rank: torch's generators, position in the data, gradients
//                             of an incomplete window; for sharded models the rank's shards of
//                             parameters and moments, "sharded.<name>", which state.json lists
//     manifest.json           sizes and checksums; written last
//
// Hosts that share no file system: each host has such a folder, with its ranks' files. The other
// files are equal on all hosts, and state.json has an id and which ranks each folder holds, under
// "placement". A folder counts if all hosts have renamed theirs. Each host resumes from its own folder. If
// it lacks a file that its ranks need, because they have another placement or the folder is lost, it
// gets the file from a host that has it. With a shared parent folder there is one folder.
//
// Size, for parameters of P bytes with Adam: 3 P. Gradients that are not zero add P. A save in the
// middle of a window adds P per rank. Generators: 5 KB per rank (+ 16 B per GPU).
//
// With the same world size a resumed run equals the uninterrupted run bit for bit. With another
// world size, models, optimizers, schedulers and shared objects are the same. The epoch continues
// after the samples that were seen. Each rank's generator is seeded anew from (seed, rank,
// completed windows). State that then has no meaning is an error: an open window, objects saved per
// rank, a range with shard() but without a cursor. Each rank reads the rows of dimension 0 that it
// needs, whichever rank wrote them. So a state of sharded models can be loaded under any strategy,
// and a state of unsharded models by sharded ones.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace hasten {

struct SaveStateOptions {
  /// Writes further files into the temporary folder, before anything else is written. The main process
  /// calls it; with ddp also the first rank of each host with its own folder, where files then become equal to the main process's. If it writes a model.safetensors with model 0's values, that file is
  /// not written again.
  std::function<void(const std::filesystem::path& folder)> also_write{};
  /// Also replaces a folder that holds something other than a state.
  bool replace_any = false;
  /// How many hosts have each rank's file: the host itself and those before it. With 2 the loss of one
  /// host's disk loses nothing; each save then sends a host's part to another. Above 1 only for hosts
  /// with their own folders.
  int64_t replicas = 1;
};

struct LoadStateOptions {
  /// Reads every file once more, on one rank, to verify its checksum. Set it to false if
  /// verify_manifest() was called before.
  bool verify_checksums = true;
};

struct LoadedState {
  /// World size of the run that saved the state.
  int world_size = 1;
  /// Windows that it had completed.
  uint64_t windows = 0;
};

/// Which ranks' values of a registered object a state holds.
enum class StateScope {
  /// The main process's; every rank loads them.
  shared,
  /// Each rank's own. Cannot be loaded with another world size.
  per_rank,
};

/// Names of files in a state's folder.
inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kStateTensorsFile = "state.safetensors";

/// Describes a state's folder from state.json and the files' headers: "world_size", "strategy",
/// "windows_completed", "optimizers" (their kinds) and "tensors", an array of {"name", "dtype",
/// "shape", "rows": [[rank, first, rows], …] or null}. Local. Throws InputError naming the file
/// that is missing or does not belong to a state.
nlohmann::json describe_state(const std::filesystem::path& folder);

/// Merges the shards that the ranks saved, and writes a model's parameters and buffers into one
/// safetensors file. `folders`: of one save, one for each host that has its own. Verifies checksums first. Local. Memory: the merged tensors; tensors that were
/// saved whole are mapped. Throws InputError naming the file that is missing or damaged; `file` is
/// then unchanged.
void consolidate_state(const std::vector<std::filesystem::path>& folders,
                       const std::filesystem::path& file, int64_t model = 0);

} // namespace hasten
