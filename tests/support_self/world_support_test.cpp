#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "hasten/base/files.h"
#include "support/world.h"

namespace hasten {

// One value of each rank, in rank order, through the case's store.
static std::vector<std::string> of_all_ranks(const std::string& key, const std::string& mine) {
  const World& world = testing_support::test_world();
  const auto store = testing_support::test_store();
  store->set(key + std::to_string(world.rank), mine);
  std::vector<std::string> all;
  for (int rank = 0; rank < world.world_size; ++rank) {
    all.push_back(store->get_to_str(key + std::to_string(rank)));
  }
  return all;
}

TEST(WorldSupport, EveryRankIsAProcessOfItsOwnWithItsNumber) {
  const World& world = testing_support::test_world();
  const auto ranks = of_all_ranks("rank", std::to_string(world.rank));
  for (int rank = 0; rank < world.world_size; ++rank) {
    EXPECT_EQ(ranks[static_cast<size_t>(rank)], std::to_string(rank));
  }
  const auto pids = of_all_ranks("pid", std::to_string(::getpid()));
  EXPECT_EQ(std::set<std::string>(pids.begin(), pids.end()).size(),
            static_cast<size_t>(world.world_size));
}

TEST(WorldSupport, TorchStartsDifferentlyOnEachRankAndAlikeInEachCase) {
  const World& world = testing_support::test_world();
  const double value = torch::rand({}, torch::kDouble).item<double>();
  const auto values = of_all_ranks("value", std::to_string(value));
  EXPECT_EQ(std::set<std::string>(values.begin(), values.end()).size(),
            static_cast<size_t>(world.world_size));
  torch::manual_seed(static_cast<uint64_t>(world.rank + 1));
  EXPECT_EQ(torch::rand({}, torch::kDouble).item<double>(), value);
}

TEST(WorldSupport, StoreOfACaseStartsEmpty) {
  EXPECT_FALSE(testing_support::test_store()->check({"rank0"}));
  EXPECT_EQ(testing_support::case_name(), "WorldSupport.StoreOfACaseStartsEmpty");
}

TEST(WorldSupport, FreshWorldsShareAPortOfTheirOwn) {
  std::set<int> ports;
  for (int i = 0; i < 3; ++i) {
    const World world = testing_support::fresh_world();
    ports.insert(world.master_port);
    EXPECT_EQ(world.rank, testing_support::test_world().rank);
    const auto all = of_all_ranks("port" + std::to_string(i), std::to_string(world.master_port));
    EXPECT_EQ(std::set<std::string>(all.begin(), all.end()).size(), 1u);
  }
  EXPECT_EQ(ports.size(), 3u);
}

TEST(WorldSupport, RanksUseOneThread) { EXPECT_EQ(torch::get_num_threads(), 1); }

} // namespace hasten
