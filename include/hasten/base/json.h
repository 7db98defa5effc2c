// Parses JSON from outside: files, flags, variables, records. All such JSON is parsed here,
// because the nesting depth must be limited: nlohmann's parser accepts any depth, but its copy,
// compare and dump functions recurse and would overflow the stack.
// Threading: free functions.
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace hasten {

/// Maximum nesting depth of arrays and objects.
inline constexpr int kMaxJsonDepth = 100;

struct JsonRules {
  int max_depth = kMaxJsonDepth;
  /// Rejects a key that occurs twice in an object. By default the last one counts.
  bool unique_keys = false;
  /// Skips // and /* */ comments.
  bool comments = false;
};

/// Result of try_parse_json().
struct ParsedJson {
  nlohmann::json value{}; // null if there is a problem
  /// Empty if there is no problem.
  std::string problem{};
  size_t byte = 0; // position near the problem, counted from 1
};

/// Time and memory are linear in the text. Throws only std::bad_alloc.
ParsedJson try_parse_json(std::string_view text, JsonRules rules = {});

/// Like try_parse_json(), but throws the problem. `where` and `source` are for the message:
/// InputError "[where] <source>: not JSON near byte=17 (line 2, column 5): …".
nlohmann::json parse_json(std::string_view where, const std::string& source, std::string_view text,
                          JsonRules rules = {});

/// Reads and parses a file. Throws InputError that names the file.
nlohmann::json read_json_file(std::string_view where, const std::filesystem::path& path,
                              JsonRules rules = {});

/// A string without its quotes, null as an empty text, other values as JSON.
std::string json_text(const nlohmann::json& value);

/// Throws InputError if a string in `values` is not UTF-8 (file names may not be) and names the
/// first such member. dump() would throw without the name.
void require_utf8(std::string_view where, const nlohmann::json& values);

} // namespace hasten
