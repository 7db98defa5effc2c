// How many cores a process may use: affinity and cgroup quota.
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>

#include "cgroup.h"
#include "hasten/base/world.h"

namespace hasten {

namespace detail {

/// quota / period of one cgroup folder; infinity if it sets none.
double cgroup_folder_cores(const std::filesystem::path& folder) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  double quota = 0; // microseconds, of all cores together
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

} // namespace detail

int allowed_cores() {
  const double quota = detail::cgroup_cores("/");
  const int cores = detail::affinity_cores();
  return quota >= cores ? cores : std::max(1, static_cast<int>(quota));
}

} // namespace hasten
