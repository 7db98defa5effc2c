// Error messages that the readers of tables share. Private to src/data.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace hasten::detail {

/// At most `limit` characters of a value for a message, with spaces for line breaks.
std::string table_sample(std::string_view value, size_t limit = 40);

/// "a, b, and 5 more": the first `limit` items and how many follow.
std::string first_items(std::vector<std::string> items, size_t limit, const char* more = " more");

/// Throws "`asked` is not a column of …" with the existing columns, a value of each, and the name
/// most similar to the text after "=" in `asked`.
[[noreturn]] void fail_unknown_column(const char* where, const std::string& asked,
                                      const std::filesystem::path& path,
                                      const std::vector<std::string>& columns,
                                      const std::vector<std::string>& samples);

} // namespace hasten::detail
