#include "hasten/base/host_memory.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "support/temporary_folder.h"

namespace hasten {

static void put_memory_file(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

TEST(HostMemory, IsWhatTheKernelCallsAvailable) {
  const testing_support::TemporaryFolder root;
  EXPECT_EQ(detail::memory_left_below(root.path()), 0);
  put_memory_file(root / "proc/meminfo",
                  "MemTotal:       32000 kB\nMemFree:  100 kB\nMemAvailable:    20000 kB\n");
  EXPECT_EQ(detail::memory_left_below(root.path()), 20'000 * 1024);
  EXPECT_GT(available_memory_bytes(), 1 << 20);
}

TEST(HostMemory, IsLessWhereAGroupOfV2LimitsIt) {
  const testing_support::TemporaryFolder root;
  put_memory_file(root / "proc/meminfo", "MemAvailable: 20000 kB\n");
  put_memory_file(root / "proc/self/mountinfo",
                  "30 25 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n");
  put_memory_file(root / "proc/self/cgroup", "0::/jobs/run1\n");
  const auto groups = root / "sys/fs/cgroup";
  put_memory_file(groups / "jobs/run1/memory.max", "max\n");
  put_memory_file(groups / "jobs/run1/memory.current", "7000\n");
  EXPECT_EQ(detail::memory_left_below(root.path()), 20'000 * 1024);
  put_memory_file(groups / "jobs/memory.max", "10000\n");
  put_memory_file(groups / "jobs/memory.current", "8000\n");
  EXPECT_EQ(detail::memory_left_below(root.path()), 2000);
  put_memory_file(groups / "jobs/memory.stat", "anon 5000\nactive_file 1\ninactive_file 700\n");
  EXPECT_EQ(detail::memory_left_below(root.path()), 2700);
  put_memory_file(groups / "jobs/memory.current", "12000\n");
  EXPECT_EQ(detail::memory_left_below(root.path()), 0);
}

TEST(HostMemory, IsLessWhereAGroupOfV1LimitsIt) {
  const testing_support::TemporaryFolder root;
  put_memory_file(root / "proc/meminfo", "MemAvailable: 20000 kB\n");
  put_memory_file(root / "proc/self/mountinfo",
                  "30 25 0:26 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  put_memory_file(root / "proc/self/cgroup", "4:memory:/docker/x\n");
  const auto group = root / "sys/fs/cgroup/memory";
  put_memory_file(group / "memory.limit_in_bytes", "9000\n");
  put_memory_file(group / "memory.usage_in_bytes", "4000\n");
  put_memory_file(group / "memory.stat", "total_inactive_file 300\n");
  EXPECT_EQ(detail::memory_left_below(root.path()), 5300);
}

TEST(HostMemory, KillsOfTheGroupAreCounted) {
  const testing_support::TemporaryFolder root;
  EXPECT_EQ(detail::memory_kills_below(root.path()), 0);
  put_memory_file(root / "proc/self/mountinfo",
                  "30 25 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
                  "31 25 0:27 / /v1 ro - cgroup cgroup rw,memory\n");
  put_memory_file(root / "proc/self/cgroup", "0::/run1\n");
  put_memory_file(root / "sys/fs/cgroup/run1/memory.events", "max 4\noom 2\noom_kill 1\n");
  EXPECT_EQ(detail::memory_kills_below(root.path()), 1);
  put_memory_file(root / "proc/self/cgroup", "4:memory:/docker/x\n");
  put_memory_file(root / "v1/docker/x/memory.oom_control", "under_oom 0\noom_kill 3\n");
  EXPECT_EQ(detail::memory_kills_below(root.path()), 3);
  EXPECT_GE(memory_kills(), 0);
}

} // namespace hasten
