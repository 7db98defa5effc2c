// The cores a process may use: affinity and cgroup quota.
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "hasten/base/world.h"

namespace hasten {

namespace detail {

/// quota / period of one cgroup folder; infinity where it sets none.
double cgroup_folder_cores(const std::filesystem::path& folder) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  double quota = 0; // microseconds of all cores together
  double period = 0; // microseconds
  if (std::ifstream v2(folder / "cpu.max"); v2) {
    std::string text;
    v2 >> text >> period; // "max 100000" or "150000 100000"
    if (!v2 || text == "max") {
      return kNone;
    }
    quota = std::strtod(text.c_str(), nullptr);
  } else {
    std::ifstream v1_quota(folder / "cpu.cfs_quota_us");
    std::ifstream v1_period(folder / "cpu.cfs_period_us");
    if (!(v1_quota >> quota) || !(v1_period >> period)) {
      return kNone;
    }
  }
  return quota > 0 && period > 0 ? quota / period : kNone; // -1: no quota
}

/// Where the v2 tree, and the v1 tree with the cpu controller, are mounted.
struct CgroupMounts {
  std::filesystem::path v2;
  std::filesystem::path v1;
};

CgroupMounts find_cgroup_mounts(const std::filesystem::path& root) {
  // "36 35 98:0 /in-fs /mount opts … - type source super,opts"
  CgroupMounts mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) {
      continue;
    }
    std::istringstream before(line.substr(0, dash));
    std::istringstream after(line.substr(dash + 3));
    std::string skip;
    std::string mount;
    std::string type;
    std::string options;
    before >> skip >> skip >> skip >> skip >> mount;
    after >> type >> skip >> options;
    const auto folder = root / std::filesystem::path(mount).relative_path();
    if (type == "cgroup2") {
      mounts.v2 = folder;
    } else if (
        type == "cgroup" &&
        ("," + options + ",").find(",cpu,") != std::string::npos) {
      mounts.v1 = folder;
    }
  }
  return mounts;
}

double cgroup_cores(const std::filesystem::path& root) {
  const CgroupMounts mounts = find_cgroup_mounts(root);
  double least = std::numeric_limits<double>::infinity();
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) { // "4:cpu,cpuacct:/path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers =
        "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,";
    const auto& mount = is_v2 ? mounts.v2 : mounts.v1;
    if (mount.empty() ||
        (!is_v2 && controllers.find(",cpu,") == std::string::npos)) {
      continue;
    }
    // Inside a container the path may be the host's and not exist here; the
    // mount's root is the container's own group then.
    std::filesystem::path folder =
        std::filesystem::path(line.substr(second + 1)).relative_path();
    while (true) {
      least = std::min(least, cgroup_folder_cores(mount / folder));
      if (folder.empty()) {
        break;
      }
      folder = folder.parent_path();
    }
  }
  return least;
}

int affinity_cores() {
  // The kernel refuses a mask shorter than its own; its length is not told.
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

} // namespace detail

int allowed_cores() {
  const double quota = detail::cgroup_cores("/");
  const int cores = detail::affinity_cores();
  return quota >= cores ? cores : std::max(1, static_cast<int>(quota));
}

} // namespace hasten
