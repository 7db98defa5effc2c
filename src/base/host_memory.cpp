#include "hasten/base/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "cgroup.h"

namespace hasten {

namespace detail {

/// The number in a file, or after `key` in it. Empty for "max".
std::optional<int64_t> number_in_file(const std::filesystem::path& path,
                                      const std::string& key = {}) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    if (key.empty() || word == key) {
      int64_t number = 0;
      if (key.empty()) {
        file.clear();
        file.seekg(0);
      }
      return file >> number ? std::optional(number) : std::nullopt;
    }
  }
  return std::nullopt;
}

/// The memory that the group's limit leaves. Empty if the group has no limit.
std::optional<int64_t> left_in_group(const std::filesystem::path& folder) {
  const bool v2 = std::filesystem::exists(folder / "memory.max");
  const auto limit = number_in_file(folder / (v2 ? "memory.max" : "memory.limit_in_bytes"));
  const auto usage = number_in_file(folder / (v2 ? "memory.current" : "memory.usage_in_bytes"));
  if (!limit || !usage) {
    return std::nullopt;
  }
  const auto files =
      number_in_file(folder / "memory.stat", v2 ? "inactive_file" : "total_inactive_file");
  return std::max<int64_t>(0, *limit - *usage + files.value_or(0));
}

int64_t memory_left_below(const std::filesystem::path& root) {
  const auto host = number_in_file(root / "proc/meminfo", "MemAvailable:");
  int64_t least = host ? *host * 1024 : std::numeric_limits<int64_t>::max(); // kB
  for (const auto& folder : cgroup_folders(root, "memory")) {
    least = std::min(least, left_in_group(folder).value_or(least));
  }
  return least == std::numeric_limits<int64_t>::max() ? 0 : least;
}

} // namespace detail

int64_t available_memory_bytes() { return detail::memory_left_below("/"); }

} // namespace hasten
