// A saved state while it is being loaded.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/core/stateful.h"
#include "hasten/state/saved_state.h"

namespace hasten::detail {

inline constexpr const char* kLoadWhere = "accelerator::load_state";

[[noreturn]] void refuse_state(const std::filesystem::path& file, const std::string& what,
                               const std::string& expected = {}, const std::string& fix = {});

// Throws InputError unless as many objects are prepared here as were saved.
void check_count(const struct StateLoad& load, const char* what, size_t saved, size_t mine);

// An object whose load may throw.
struct StatefulLoad {
  std::filesystem::path file{};
  Stateful* object = nullptr;
  NamedTensors tensors{};
  nlohmann::json values{};
  // The old state, to restore after a failure.
  NamedTensors old_tensors{};
  nlohmann::json old_values = nlohmann::json::object();
};

struct StateLoad {
  std::filesystem::path folder{};
  nlohmann::json shared{};
  nlohmann::json own{};
  NamedTensors shared_tensors{};
  NamedTensors own_tensors{};
  bool same_world = true;
  std::filesystem::path rank_file{};
  std::vector<StatefulLoad> objects{};
  std::vector<std::function<void()>> apply{}; // these do not throw

  std::filesystem::path state_file() const { return folder / kStateFile; }
  void add(const std::filesystem::path& file, Stateful* object, NamedTensors tensors,
           const nlohmann::json& values) {
    objects.push_back({file, object, std::move(tensors), values});
  }
};

// Reads the folder's files but the models'; `verify`: also their checksums, on rank 0.
void read_state_files(StateLoad& load, int rank, int world_size, bool verify);
// Throws InputError for state that has no meaning with another number of ranks.
void check_other_world(const StateLoad& load, int world_size);
// Loads load.objects. If one throws, those before it get their old state back.
void load_objects(StateLoad& load);
// Gives all of load.objects their old state back.
void undo_objects(StateLoad& load);

} // namespace hasten::detail
