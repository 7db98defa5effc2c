// The contents of a state while it is saved or loaded.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/comm/agree.h"
#include "hasten/core/named_tensors.h"
#include "hasten/core/stateful.h"

namespace hasten::detail {

// One rank's view: `shared` is the same on every rank, and one of them writes it.
inline constexpr const char* kSaveWhere = "accelerator::save_state";

struct StateParts {
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

} // namespace hasten::detail
