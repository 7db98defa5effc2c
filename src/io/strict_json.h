// JSON with duplicate keys and deep nesting refused: both parse, silently, to
// something the file does not mean. Private to src/io.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace hasten::detail {

/// `part` is what the text is of the file, for messages: "the header".
/// Throws InputError from `where` naming the file.
nlohmann::json parse_strict_json(
    const char* where,
    const std::filesystem::path& path,
    std::string_view text,
    const char* part);

} // namespace hasten::detail
