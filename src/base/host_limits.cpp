// The cores and the memory that a process may use: affinity, and the limits of its control groups.
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "hasten/base/host_memory.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"

namespace hasten {

namespace detail {

/// Mount points of the v2 tree and of the v1 tree with the controller.
struct CgroupMounts {
  std::filesystem::path v2;
  std::filesystem::path v1;
};

bool lists(const std::string& items, const std::string& item) {
  return std::ranges::count(split(items), item) > 0;
}

CgroupMounts find_cgroup_mounts(const std::filesystem::path& root, const std::string& controller) {
  // "36 35 98:0 /in-fs /mount opts … - type source super,opts"
  CgroupMounts mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const auto halves = split(line, " - ");
    const auto place = split(halves.front(), " ");
    const auto type = split(halves.back(), " ");
    if (halves.size() != 2 || place.size() < 5 || type.size() < 3) {
      continue;
    }
    const auto folder = root / std::filesystem::path(place[4]).relative_path();
    if (type[0] == "cgroup2") {
      mounts.v2 = folder;
    } else if (type[0] == "cgroup" && lists(type[2], controller)) {
      mounts.v1 = folder;
    }
  }
  return mounts;
}

/// Folders, below `root`, of this process's v1 and v2 groups with the controller ("cpu", "memory"),
/// innermost first, up to the mount. They may not exist.
std::vector<std::filesystem::path> cgroup_folders(const std::filesystem::path& root,
                                                  const std::string& controller) {
  const CgroupMounts mounts = find_cgroup_mounts(root, controller);
  std::vector<std::filesystem::path> folders;
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) { // "4:cpu,cpuacct:/path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const auto& mount = controllers.empty() ? mounts.v2 : mounts.v1;
    if (mount.empty() || !(controllers.empty() || lists(controllers, controller))) {
      continue;
    }
    // In a container the path may be the host's and not exist here. The mount's root is then the
    // container's own group.
    std::filesystem::path folder = std::filesystem::path(line.substr(second + 1)).relative_path();
    while (true) {
      folders.push_back(mount / folder);
      if (folder.empty()) {
        break;
      }
      folder = folder.parent_path();
    }
  }
  return folders;
}

/// quota / period of one cgroup folder; infinity if it sets none.
double cgroup_folder_cores(const std::filesystem::path& folder) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  double quota = 0; // microseconds, of all cores together
  double period = 0; // microseconds
  if (std::ifstream v2(folder / "cpu.max"); v2) {
    v2 >> quota >> period; // "max 100000" or "150000 100000"
  } else {
    std::ifstream(folder / "cpu.cfs_quota_us") >> quota;
    std::ifstream(folder / "cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : kNone; // "max", -1, no file: no quota
}

double cgroup_cores(const std::filesystem::path& root) {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& folder : cgroup_folders(root, "cpu")) {
    least = std::min(least, cgroup_folder_cores(folder));
  }
  return least;
}

int affinity_cores() {
  // The kernel rejects a mask that is shorter than its own, whose length is not known.
  for (int cores = 1024; cores <= (1 << 20); cores *= 2) {
    cpu_set_t* set = CPU_ALLOC(cores);
    const size_t size = CPU_ALLOC_SIZE(cores);
    CPU_ZERO_S(size, set);
    const bool good = ::sched_getaffinity(0, size, set) == 0;
    const int error = errno;
    const int count = good ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (good) {
      return std::max(1, count);
    }
    if (error != EINVAL) {
      break;
    }
  }
  return 1;
}

/// The number in a file, or after `key` in it. Empty for "max".
std::optional<int64_t> number_in_file(const std::filesystem::path& path,
                                      const std::string& key = {}) {
  std::ifstream file(path);
  std::string word;
  while (word != key && file >> word) {
  }
  int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
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

int64_t memory_kills_below(const std::filesystem::path& root) {
  for (const auto& folder : cgroup_folders(root, "memory")) {
    for (const char* file : {"memory.events", "memory.oom_control"}) { // v2, v1
      if (const auto kills = number_in_file(folder / file, "oom_kill")) {
        return *kills;
      }
    }
  }
  return 0;
}

} // namespace detail

int allowed_cores() {
  const double quota = detail::cgroup_cores("/");
  const int cores = detail::affinity_cores();
  return quota >= cores ? cores : std::max(1, static_cast<int>(quota));
}

int64_t memory_kills() { return detail::memory_kills_below("/"); }

int64_t available_memory_bytes() { return detail::memory_left_below("/"); }

} // namespace hasten
