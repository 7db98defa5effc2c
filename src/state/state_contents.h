// The contents of a state while it is saved or loaded.
#pragma once

#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hasten/comm/agree.h"
#include "hasten/core/named_tensors.h"
#include "hasten/core/stateful.h"
#include "hasten/state/saved_state.h"

namespace hasten::detail {

inline constexpr const char* kSaveWhere = "accelerator::save_state";
inline constexpr const char* kLoadWhere = "accelerator::load_state";

// What one rank saves: `shared` is the same on every rank, and one of them writes it.
struct StateToSave {
  NamedTensors shared{};
  nlohmann::json shared_values = nlohmann::json::object();
  NamedTensors own{};
  nlohmann::json own_values = nlohmann::json::object();
};

// "model.safetensors", "model_1.safetensors", …
std::string model_file_name(size_t model);
// "state_rank_0.safetensors", …
std::string rank_file_name(int rank);

// Saves an object's tensors below `prefix`; returns its JSON values. Throws InputError for
// values that are not finite.
nlohmann::json save_stateful(const Stateful& object, const std::string& name, NamedTensors& tensors,
                             const std::string& prefix);

[[noreturn]] void refuse_state(const std::filesystem::path& file, const std::string& what,
                               const std::string& expected = {}, const std::string& fix = {});

// Throws InputError unless as many objects are prepared here as were saved.
void check_count(const struct StateToLoad& load, const char* what, size_t saved, size_t mine);

// An object whose load may throw.
struct ObjectToLoad {
  std::filesystem::path file{};
  Stateful* object = nullptr;
  NamedTensors tensors{};
  nlohmann::json values{};
  // The old state, to restore after a failure.
  NamedTensors old_tensors{};
  nlohmann::json old_values = nlohmann::json::object();
};

// What was read, and what load() will do with it: add_to() of each part checks and adds its share.
struct StateToLoad {
  std::filesystem::path folder{};
  nlohmann::json shared{};
  nlohmann::json own{};
  NamedTensors shared_tensors{};
  NamedTensors own_tensors{};
  bool same_world = true;
  std::filesystem::path rank_file{};
  std::vector<ObjectToLoad> objects{};
  std::vector<std::function<void()>> apply{}; // these do not throw

  std::filesystem::path state_file() const { return folder / kStateFile; }
  void add(const std::filesystem::path& file, Stateful* object, NamedTensors tensors,
           const nlohmann::json& values) {
    objects.push_back({file, object, std::move(tensors), values});
  }
  // Targets and their new values.
  void copy(std::vector<std::pair<at::Tensor, at::Tensor>> pairs) {
    apply.push_back([pairs = std::move(pairs)] {
      const at::NoGradGuard no_grad;
      for (const auto& [target, saved] : pairs) {
        target.copy_(saved);
      }
    });
  }
};

// Reads the folder's files but the models'; `verify`: also their checksums, on rank 0.
void read_state_files(StateToLoad& load, int rank, int world_size, bool verify);
// Throws InputError for state that has no meaning with another number of ranks.
void check_other_world(const StateToLoad& load, int world_size);
// Loads load.objects. If one throws, those before it get their old state back.
void load_objects(StateToLoad& load);
// Gives the first `count` of load.objects their old state back.
void undo_objects(const StateToLoad& load, size_t count);

// The shard that this rank holds of a parameter: rows [first, first + count) of dimension 0.
struct HeldRows {
  std::vector<int64_t> sizes{}; // of the whole tensor
  int64_t first = 0;
  int64_t count = 0;
};
// By the names of parameter_names(), every name of a tied one.
using HeldRowsByName = std::map<std::string, HeldRows>;

// Rows of the whole tensor. A 0-d tensor counts as one row.
at::Tensor rows_of_whole(const at::Tensor& whole, const HeldRows& held);

// Moves this rank's shards of parameters, and of tensors with their shape (moments), from
// parts.shared to parts.own, and records in parts.shared_values which rank has which rows.
// `models`: the shards of the models' parameters, by name. `ranks`: how many hold a replica
// together. `folder`: [rank] the folder that it writes to, which gets each shard once. Local.
void split_shards(StateToSave& parts, const NamedTensors& models, const HeldRowsByName& held,
                  int ranks, int rank, const std::vector<int>& folder);

// The ranks whose files `rank` reads to load a state. `far`: how hard a rank's file is to reach; it
// chooses between files with the same rows. If `held` is empty: for every row of the state. Local.
std::set<int> rank_files_read(const nlohmann::json& state, int rank, int world_size,
                              const HeldRowsByName& held, const std::function<int(int)>& far);

// Reads a folder's state.json. Throws InputError unless it is one of a state.
nlohmann::json read_state_json(const std::filesystem::path& folder);

// Puts into load.shared_tensors the rows that this rank holds now of every tensor that belongs to a
// parameter, from the file of any rank that has them, or from a whole tensor. Local. Throws
// InputError naming the file that is missing or has unexpected rows. Returns whether moments of 8
// bits became fp32, because these rows are not those that were saved.
bool join_shards(StateToLoad& load, const HeldRowsByName& held);

} // namespace hasten::detail
