// What a state consists of, on its way to files and back.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/comm/agree.h"
#include "hasten/core/named_tensors.h"

namespace hasten::detail {

// One rank's view: `shared` is the same on every rank, and one of them writes it.
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

void put_below(NamedTensors& tensors, const std::string& prefix, const NamedTensors& more);

} // namespace hasten::detail
