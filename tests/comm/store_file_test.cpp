// Ranks that meet through a file.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "support/on_device.h"
#include "support/temporary_folder.h"
#include "support/world.h"

namespace hasten {

using testing_support::TemporaryFolder;
using testing_support::test_store;
using testing_support::test_world;

/// Rank 0's path on all ranks.
static std::string shared_path(const TemporaryFolder& folder) {
  if (test_world().is_main()) {
    test_store()->set("path", (folder / "meeting").string());
  }
  return test_store()->get_to_str("path");
}

static World world_by_file(const std::string& path, int local_world_size) {
  World world = test_world();
  world.local_world_size = local_world_size;
  world.master_addr = "nowhere.invalid";
  world.master_port = 0;
  world.store_file = path;
  return world;
}

TEST(StoreFile, RanksMeetByItAgainAndAgainAndItIsGoneBehindThem) {
  const TemporaryFolder folder;
  const std::string path = shared_path(folder);
  // With LOCAL_WORLD_SIZE of one host, and with that of several hosts.
  for (const int local : {test_world().world_size, 1}) {
    for (int time = 0; time < 2; ++time) {
      const auto comm = Communicator::create(world_by_file(path, local));
      EXPECT_TRUE(!test_world().is_main() || !std::filesystem::exists(path));
      torch::Tensor tensor = on_device::ones({2});
      comm->all_reduce(tensor, ReduceOp::SUM, "ones");
      EXPECT_EQ(tensor[0].item<int>(), test_world().world_size);
      comm->close();
    }
  }
}

TEST(StoreFile, WhatAKilledRunOrAnotherProgramLeftIsWaitedOver) {
  const TemporaryFolder folder;
  const std::string path = shared_path(folder);
  for (const char* left : {"hasten-store 0 127.0.0.1 9\n", "hasten-store", "something else\n"}) {
    if (test_world().is_main()) {
      std::ofstream(path) << left;
    }
    test_store()->add(std::string("left ") + left, 1);
    while (test_store()->add(std::string("left ") + left, 0) < test_world().world_size) {
    }
    const auto comm = Communicator::create(world_by_file(path, test_world().world_size));
    torch::Tensor tensor = on_device::ones({2});
    comm->all_reduce(tensor, ReduceOp::SUM, "ones");
    EXPECT_EQ(tensor[0].item<int>(), test_world().world_size);
    comm->close();
  }
}

TEST(StoreFile, WithoutRankZeroTheOthersSayWhatTheyWaitedFor) {
  const TemporaryFolder folder;
  const std::string path = shared_path(folder);
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(300);
  if (test_world().is_main()) {
    if (test_world().world_size > 1) { // a folder that does not exist
      EXPECT_THROW(
          Communicator::create(world_by_file(path + "/a/b", test_world().world_size), options),
          InputError);
    }
    return;
  }
  try {
    Communicator::create(world_by_file(path, test_world().world_size), options);
    FAIL() << "met nobody";
  } catch (const CommunicationError& error) {
    EXPECT_NE(std::string(error.what()).find("store_file=" + path), std::string::npos)
        << error.what();
  }
}

} // namespace hasten
