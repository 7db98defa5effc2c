#include "table_errors.h"

#include <algorithm>

#include "hasten/base/error.h"

namespace hasten::detail {

std::string table_sample(std::string_view value, size_t limit) {
  std::string sample;
  size_t characters = 0;
  for (const char c : value) {
    if ((static_cast<unsigned char>(c) & 0xC0) != 0x80 && ++characters > limit) {
      return sample + "...";
    }
    sample += c == '\n' || c == '\r' || c == '\t' ? ' ' : c;
  }
  return sample;
}

void fail_unknown_column(const char* where, const std::string& asked,
                         const std::filesystem::path& path, const std::vector<std::string>& columns,
                         const std::vector<std::string>& samples) {
  std::string list;
  constexpr size_t kShown = 20;
  for (size_t i = 0; i < std::min(columns.size(), kShown); ++i) {
    list += (i == 0 ? "" : ", ") + table_sample(columns[i]) + " (\"" +
            table_sample(i < samples.size() ? samples[i] : "") + "\")";
  }
  if (columns.size() > kShown) {
    list += ", and " + std::to_string(columns.size() - kShown) + " more";
  }
  const std::string near = nearest_name(asked.substr(asked.find('=') + 1), columns.data(),
                                        columns.data() + columns.size());
  throw InputError(where, asked + " is not a column of " + path.string(), "one of: " + list,
                   near.empty() ? "" : "did you mean " + near + "?");
}

} // namespace hasten::detail
