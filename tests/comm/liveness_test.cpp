// The watch over peers of other hosts, which are known by their beats alone: three
// of them in one process, on one store.
#include "liveness.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace hasten::detail {

using std::chrono::milliseconds;

static bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  return condition();
}

TEST(Liveness, TellsWhoIsLostBehindAFailureToo) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set(Liveness::kFailureKey, std::string(Liveness::kNoFailure));
  std::vector<Hello> hellos;
  for (int rank = 0; rank < 3; ++rank) {
    store->set(Liveness::beat_key(rank), std::string(Liveness::kFirstBeat));
    Hello hello;
    hello.rank = rank;
    hello.launch_rank = rank + 10; // what it is called
    hello.world_size = 3;
    hello.process_host = "host " + std::to_string(rank);
    hellos.push_back(hello);
  }
  std::vector<std::unique_ptr<Liveness>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    World world;
    world.rank = rank;
    world.world_size = 3;
    world.agent_store = true;
    ranks.push_back(std::make_unique<Liveness>(
        LivenessConfig{world, store, hellos, milliseconds(800), [] {}}));
  }
  using Lost = std::vector<bool>;
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(ranks[0]->lost(), (Lost{false, false, false}));

  ranks[2]->stop(milliseconds(1000)); // silent from here on
  ASSERT_TRUE(comes_true([&] { return ranks[0]->failed(); }));
  EXPECT_NE(
      ranks[0]->cause().text.find("rank 12 died or cannot be reached"),
      std::string::npos)
      << ranks[0]->cause().text;
  EXPECT_TRUE(comes_true([&] { return ranks[1]->failed(); }));
  EXPECT_EQ(ranks[1]->cause().lost, std::vector<int>{2});
  std::this_thread::sleep_for(milliseconds(1000)); // they go on beating
  EXPECT_EQ(ranks[0]->lost(), (Lost{false, false, true}));
  EXPECT_EQ(ranks[1]->lost(), (Lost{false, false, true}));

  ranks[1]->stop(milliseconds(1000));
  EXPECT_TRUE(
      comes_true([&] { return ranks[0]->lost() == Lost{false, true, true}; }));
}

} // namespace hasten::detail
