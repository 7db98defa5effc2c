// JSON from outside: files, flags, variables, rows. Every such text is parsed here,
// where nesting is bounded: nlohmann's copy, compare and dump recurse, and would
// overrun the stack on a text that its parser copes with.
// Threading: free functions.
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace hasten {

/// Arrays and objects within each other that a text may have.
inline constexpr int kMaxJsonDepth = 100;

struct JsonRules {
  int max_depth = kMaxJsonDepth;
  /// Refuses a key that occurs twice in an object; else the last one counts.
  bool unique_keys = false;
  /// Skips // and /* */ comments.
  bool comments = false;
};

/// What try_parse_json() found.
struct ParsedJson {
  nlohmann::json value{}; // null where there is a problem
  /// Empty: none.
  std::string problem{};
  size_t byte = 0; // near which the problem is, from 1
};

/// Time and memory: linear in the text. Never throws but for memory.
ParsedJson try_parse_json(std::string_view text, JsonRules rules = {});

/// The same, for callers that add nothing to the message.
/// Throws InputError from `where`: "<source>: not JSON near byte=17 (line 2): …".
nlohmann::json parse_json(std::string_view where, const std::string& source, std::string_view text,
                          JsonRules rules = {});

/// Reads and parses a file. Throws InputError that names it.
nlohmann::json read_json_file(std::string_view where, const std::filesystem::path& path,
                              JsonRules rules = {});

/// Throws InputError naming the first member with a text that JSON cannot hold, as
/// file names may be. dump() would throw without a place.
void require_utf8(std::string_view where, const nlohmann::json& values);

} // namespace hasten
