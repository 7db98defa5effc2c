#include "hasten/base/world.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::EnvironmentValues;

// Sets exactly these variables, and no other that describes a world.
static EnvironmentValues world_variables(const EnvironmentValues& set) {
  EnvironmentValues all = testing_support::without_launchers();
  all.emplace_back("OMP_NUM_THREADS", std::nullopt);
  all.insert(all.end(), set.begin(), set.end());
  return all;
}

static std::string world_error(const EnvironmentValues& set) {
  const testing_support::ScopedEnvironment environment(world_variables(set));
  try {
    world_from_environment();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(World, WithoutVariablesThisProcessIsAlone) {
  const testing_support::ScopedEnvironment environment(world_variables({}));
  const World world = world_from_environment();
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.world_size, 1);
  EXPECT_EQ(world.local_world_size, 1);
  EXPECT_EQ(world.source, "alone");
}

TEST(World, TorchrunsVariablesAreRead) {
  const testing_support::ScopedEnvironment environment(
      world_variables({{"RANK", "5"},
                       {"WORLD_SIZE", "8"},
                       {"LOCAL_RANK", "1"},
                       {"LOCAL_WORLD_SIZE", "4"},
                       {"MASTER_ADDR", "node0"},
                       {"MASTER_PORT", "29500"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  const World world = world_from_environment();
  EXPECT_EQ(world.rank, 5);
  EXPECT_EQ(world.world_size, 8);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_world_size, 4);
  EXPECT_EQ(world.master_addr, "node0");
  EXPECT_EQ(world.master_port, 29500);
  EXPECT_TRUE(world.agent_store);
  EXPECT_FALSE(world.is_main());
}

TEST(World, LocalVariablesDefaultWhenBothAreAbsent) {
  const testing_support::ScopedEnvironment environment(world_variables(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}}));
  const World world = world_from_environment();
  EXPECT_EQ(world.local_rank, 0);
  EXPECT_EQ(world.local_world_size, 1);
}

TEST(World, EveryMissingVariableIsNamed) {
  const std::string text = world_error({{"RANK", "0"}, {"LOCAL_RANK", "0"}});
  for (const char* name : {"WORLD_SIZE is not set", "MASTER_ADDR is not set",
                           "MASTER_PORT is not set", "LOCAL_WORLD_SIZE is not set"}) {
    EXPECT_NE(text.find(name), std::string::npos) << text;
  }
  EXPECT_EQ(text.find(" RANK is not set"), std::string::npos) << text;
}

TEST(World, EveryContradictionIsNamed) {
  const std::string text = world_error({{"RANK", "4"},
                                        {"WORLD_SIZE", "4"},
                                        {"LOCAL_RANK", "7"},
                                        {"LOCAL_WORLD_SIZE", "6"},
                                        {"MASTER_ADDR", "node0"},
                                        {"MASTER_PORT", "99999"}});
  for (const char* part :
       {"RANK=4 with WORLD_SIZE=4", "LOCAL_RANK=7 with LOCAL_WORLD_SIZE=6",
        "LOCAL_WORLD_SIZE=6 with WORLD_SIZE=4", "MASTER_PORT=99999 is not in 1..65535"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(World, ValuesThatAreNoNumbersAreNamed) {
  const std::string text = world_error(
      {{"RANK", "one"}, {"WORLD_SIZE", "2x"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}});
  EXPECT_NE(text.find("RANK=one is not in 0.."), std::string::npos) << text;
  EXPECT_NE(text.find("WORLD_SIZE=2x is not in 1.."), std::string::npos) << text;
}

TEST(World, WhereTheMasterIsSaysNotWhoOneIs) {
  const std::string text = world_error({{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}});
  EXPECT_NE(text.find("RANK is not set"), std::string::npos) << text;
  EXPECT_NE(text.find("WORLD_SIZE is not set"), std::string::npos) << text;
}

TEST(World, AFileStandsForAddressAndPort) {
  const auto variables = [](const char* port) {
    EnvironmentValues values = testing_support::without_launchers();
    values.emplace_back("RANK", "1");
    values.emplace_back("WORLD_SIZE", "2");
    values.emplace_back("HASTEN_STORE_FILE", "/shared/run 7");
    values.emplace_back("MASTER_ADDR", "gpu08");
    values.emplace_back("MASTER_PORT", port);
    return values;
  };
  {
    const testing_support::ScopedEnvironment environment(variables(""));
    const World world = world_from_environment();
    EXPECT_EQ(world.rank, 1);
    EXPECT_EQ(world.world_size, 2);
    EXPECT_EQ(world.store_file, "/shared/run 7");
    EXPECT_NE(describe(world).find("store file /shared/run 7"), std::string::npos);
  }
  // A launcher that sets a port serves a store at this port.
  const testing_support::ScopedEnvironment environment(variables("29500"));
  EXPECT_EQ(world_from_environment().store_file, "");
  EXPECT_EQ(world_from_environment().master_port, 29500);
}

TEST(Cores, AllowedCoresFollowTheAffinityMask) {
  std::thread([] { // each thread has its own mask
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(allowed_cores(), 1);
  })
      .join();
  EXPECT_GE(allowed_cores(), 1);
}

static void put_cores_file(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

TEST(Cores, LeastQuotaOfTheV2AncestorsCounts) {
  const testing_support::TemporaryFolder root;
  put_cores_file(root / "proc/self/mountinfo",
                 "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
  put_cores_file(root / "proc/self/cgroup", "0::/jobs/run1\n");
  EXPECT_TRUE(std::isinf(detail::cgroup_cores(root.path())));
  put_cores_file(root / "sys/fs/cgroup/jobs/run1/cpu.max", "400000 100000\n");
  put_cores_file(root / "sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_DOUBLE_EQ(detail::cgroup_cores(root.path()), 4.0);
  put_cores_file(root / "sys/fs/cgroup/jobs/cpu.max", "150000 100000\n");
  EXPECT_DOUBLE_EQ(detail::cgroup_cores(root.path()), 1.5);
}

TEST(Cores, QuotaOfV1IsReadAtTheMountWhenTheHostsPathIsNotVisible) {
  const testing_support::TemporaryFolder root;
  put_cores_file(
      root / "proc/self/mountinfo",
      "30 25 0:26 /docker/x /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
      "31 25 0:27 / /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset\n");
  put_cores_file(root / "proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n3:cpuset:/\n");
  put_cores_file(root / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n");
  put_cores_file(root / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(detail::cgroup_cores(root.path()), 2.5);
  put_cores_file(root / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  EXPECT_TRUE(std::isinf(detail::cgroup_cores(root.path())));
}

TEST(Cores, ThreadsPerRankDividesUnlessTheUserDecided) {
  {
    const testing_support::ScopedEnvironment environment(world_variables({}));
    EXPECT_EQ(threads_per_rank(1), allowed_cores());
    EXPECT_EQ(threads_per_rank(1 << 20), 1);
  }
  const testing_support::ScopedEnvironment environment(
      world_variables({{"OMP_NUM_THREADS", "7,2"}}));
  EXPECT_EQ(threads_per_rank(4), 7);
  const testing_support::ScopedEnvironment bad(EnvironmentValues{{"OMP_NUM_THREADS", "many"}});
  EXPECT_THROW(threads_per_rank(4), InputError);
}

TEST(Cores, CpusThatSlurmGaveATaskAreItsOwn) {
  World world;
  world.local_world_size = 1 << 20;
  const testing_support::ScopedEnvironment environment(world_variables({}));
  EXPECT_EQ(threads_per_rank(world), 1);
  world.cpus_per_task = 1 << 20;
  EXPECT_EQ(threads_per_rank(world), allowed_cores());
  world.cpus_per_task = 1;
  world.local_world_size = 1;
  EXPECT_EQ(threads_per_rank(world), 1);
  const testing_support::ScopedEnvironment user(EnvironmentValues{{"OMP_NUM_THREADS", "3"}});
  EXPECT_EQ(threads_per_rank(world), 3);
}

TEST(Cores, MoreThreadsThanAllowedCoresAreWarnedOf) {
  std::thread([] { // each thread has its own mask
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(oversubscription(1, 1), "");
    EXPECT_EQ(oversubscription(2, 1).rfind("2 ranks of 1 thread share 1 core ", 0), 0);
    const std::string text = oversubscription(1, 4);
    EXPECT_NE(text.find("unset OMP_NUM_THREADS"), std::string::npos) << text;
  })
      .join();
}

} // namespace hasten
