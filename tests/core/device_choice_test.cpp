// The choice of a device on a host with two of them.
#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "hasten/core/device.h"
#include "support/error_of.h"
#include "support/test_device.h"

namespace hasten::detail {

using testing::IsSubstring;
using testing_support::kTestDevices;
using testing_support::test_device;

static World world_of(int local_rank, int local_world_size) {
  World world;
  world.rank = world.local_rank = local_rank;
  world.world_size = world.local_world_size = local_world_size;
  return world;
}

TEST(DeviceChoice, AutoTakesADeviceForEachRankAndSaysSo) {
  for (int rank = 0; rank < kTestDevices; ++rank) {
    const DeviceChoice choice = choose_device("auto", world_of(rank, kTestDevices), false);
    EXPECT_EQ(choice.device, test_device(rank));
    EXPECT_EQ(choice.note,
              "device=auto takes test_device, because this host has 2 test_device devices for 2 "
              "processes");
  }
}

TEST(DeviceChoice, AutoTakesTheCpuForMoreRanksAndSaysSo) {
  for (const bool shared : {false, true}) {
    const DeviceChoice choice = choose_device("auto", world_of(0, 3), shared);
    EXPECT_EQ(choice.device, at::Device(at::kCPU));
    EXPECT_EQ(choice.note,
              "device=auto takes the CPU, because this host has 2 test_device devices for 3 "
              "processes");
  }
}

TEST(DeviceChoice, ANamedDeviceIsNeverReplaced) {
  EXPECT_EQ(choose_device("cpu", world_of(0, 1), false).device, at::Device(at::kCPU));
  EXPECT_EQ(choose_device("test_device", world_of(1, 2), false).device, test_device(1));
  EXPECT_EQ(choose_device("test_device:1", world_of(0, 1), false).device, test_device(1));
  const auto refusal = [](const char* name, int ranks) {
    return testing_support::error_of([&] { choose_device(name, world_of(0, ranks), false); });
  };
  for (const auto& [name, ranks, part] :
       {std::tuple("test_device:2", 1, "device=test_device:2 on a host with 2 such devices"),
        std::tuple("test_device", 3, "device=test_device for 3 processes on a host with 2"),
        std::tuple("test_device:0", 2, "device=test_device:0 for 2 processes on a host with 2"),
        std::tuple("test_device:x", 1, "Expected auto, cpu, cuda or cuda:N")}) {
    EXPECT_PRED_FORMAT2(IsSubstring, part, refusal(name, ranks));
  }
}

TEST(DeviceChoice, RanksShareADeviceWithABackEndThatMovesHostMemory) {
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(choose_device("test_device", world_of(rank, 3), true).device, test_device(rank % 2));
    EXPECT_EQ(choose_device("test_device:1", world_of(rank, 3), true).device, test_device(1));
  }
}

} // namespace hasten::detail
