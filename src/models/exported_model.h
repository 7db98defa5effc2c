// Models of folders that hasten.export wrote: config.json, weights, and the graph of their logits.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "hasten/models/model_family.h"

namespace hasten::detail {

/// Whether the folder has a graph.
bool is_exported_folder(const std::filesystem::path& folder);

/// Registers the folder's model_type as a family whose models run the graph, unless hasten or the program
/// has that family. Throws InputError if another folder of this model_type has another graph, and if
/// config.json names no class with a head that hasten knows.
void register_exported_family(const std::filesystem::path& folder, const nlohmann::json& config);

/// Null if there is none of that type.
const ModelFamily* find_model_family(std::string_view model_type);

} // namespace hasten::detail
