#include "table_errors.h"

#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

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

std::string first_items(std::vector<std::string> items, size_t limit, const char* more) {
  if (items.size() > limit) {
    const size_t others = items.size() - limit;
    items.resize(limit);
    items.push_back("and " + std::to_string(others) + more);
  }
  return joined(items);
}

void fail_unknown_column(const char* where, const std::string& asked,
                         const std::filesystem::path& path, const std::vector<std::string>& columns,
                         const std::vector<std::string>& samples) {
  std::vector<std::string> list;
  for (size_t i = 0; i < columns.size(); ++i) {
    list.push_back(table_sample(columns[i]) + " (\"" +
                   table_sample(i < samples.size() ? samples[i] : "") + "\")");
  }
  const std::string near = nearest_name(asked.substr(asked.find('=') + 1), columns);
  throw InputError(where, asked + " is not a column of " + path.string(),
                   "one of: " + first_items(std::move(list), 20),
                   near.empty() ? "" : "did you mean " + near + "?");
}

} // namespace hasten::detail
