// Reads the JSON of a graph, in the format of torch/_export/serde/schema.py (major version 8).
#pragma once

#include <initializer_list>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

#include "graph.h"

namespace hasten::detail {

struct ReadGraph {
  Graph graph{};
  std::map<std::string, int> slots{}; // by the name of the value
};

/// Looks up operators and binds arguments. Values that are read before they are made, and arguments
/// that the operator's schema does not take, are errors. Does not find segments.
/// Throws InputError that names the operator, and nlohmann::json::exception where the JSON has another
/// form than the format's.
ReadGraph read_graph(const nlohmann::json& json, bool substitutions);

/// The only entry of an object like {"as_int": 3}. Throws InputError for something else.
std::pair<std::string, const nlohmann::json*> entry_of(const nlohmann::json& value);

/// Throws InputError for a field that is not `known` and is not empty: a newer format means something by it.
void require_known(const nlohmann::json& object, const std::string& what,
                   std::initializer_list<const char*> known);

/// c10's dtype for the format's number. Throws InputError for one that is not known.
at::ScalarType scalar_type_of(int64_t code);

} // namespace hasten::detail
