// What readers of tables say alike. Private to src/data.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace hasten::detail {

/// At most `limit` characters of a value for a message, line breaks as spaces.
std::string table_sample(std::string_view value, size_t limit = 40);

/// "`asked` is not a column of …" with the columns there are, a value of each,
/// and the nearest name to what follows the "=" in `asked`.
[[noreturn]] void fail_unknown_column(const char* where, const std::string& asked,
                                      const std::filesystem::path& path,
                                      const std::vector<std::string>& columns,
                                      const std::vector<std::string>& samples);

} // namespace hasten::detail
