// A saved state while it is being loaded.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/accelerator/state.h"
#include "hasten/core/stateful.h"

namespace hasten::detail {

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

} // namespace hasten::detail
