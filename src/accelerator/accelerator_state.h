// What a state consists of, on its way to files and back.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/core/stateful.h"

namespace torch::nn {
class Module;
}

namespace hasten {
class Communicator;
}

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

// Parameters and buffers by name, tied ones under each of their names.
NamedTensors named_model_tensors(const torch::nn::Module& module);

// The tensors whose names begin with `prefix`, without it.
NamedTensors tensors_below(const NamedTensors& tensors, const std::string& prefix);
void put_below(NamedTensors& tensors, const std::string& prefix, const NamedTensors& more);

// Runs `work` on every rank and gives each what all of them returned, by rank. If
// it threw anywhere, every rank throws: the first of those its own error, the
// others one that repeats it. Collective.
std::vector<nlohmann::json> on_every_rank(Communicator& communicator, const char* stage,
                                          const std::function<nlohmann::json()>& work);

} // namespace hasten::detail
