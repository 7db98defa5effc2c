// Monitoring of peers on other hosts by their heartbeats: three ranks in one process with one
// store.
#include "meet/liveness.h"

#include <gtest/gtest.h>

#include <atomic>
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

using Ranks = std::vector<std::shared_ptr<Liveness>>;

/// Answers only while it is open.
class SlowStore final : public c10d::HashStore {
 public:
  std::atomic<bool> open{true};

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    while (!open) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    HashStore::set(key, value);
  }
};

static Ranks three_ranks(const StorePtr& store = c10::make_intrusive<c10d::HashStore>()) {
  store->set(Liveness::kFailureKey, std::string(Liveness::kNoFailure));
  std::vector<Hello> hellos;
  for (int rank = 0; rank < 3; ++rank) {
    store->set(Liveness::beat_key(rank), std::string(Liveness::kFirstBeat));
    Hello hello;
    hello.rank = rank;
    hello.launch_rank = rank + 10; // messages give this number
    hello.world_size = 3;
    hello.process_host = "host " + std::to_string(rank);
    hellos.push_back(hello);
  }
  Ranks ranks;
  for (int rank = 0; rank < 3; ++rank) {
    World world;
    world.rank = rank;
    world.world_size = 3;
    world.agent_store = true;
    ranks.push_back(Liveness::start({world, store, hellos, milliseconds(800), [] {}}));
  }
  return ranks;
}

TEST(Liveness, NamesWhoIsLostBehindAFailureToo) {
  const Ranks ranks = three_ranks();
  using Lost = std::vector<bool>;
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(ranks[0]->lost(), (Lost{false, false, false}));

  ranks[2]->stop(milliseconds(1000)); // silent from here on
  ASSERT_TRUE(comes_true([&] { return ranks[0]->failed(); }));
  EXPECT_NE(ranks[0]->cause().text.find("rank 12 died or cannot be reached"), std::string::npos)
      << ranks[0]->cause().text;
  EXPECT_TRUE(comes_true([&] { return ranks[1]->failed(); }));
  EXPECT_EQ(ranks[1]->cause().lost, std::vector<int>{2});
  std::this_thread::sleep_for(milliseconds(1000)); // the others still write heartbeats
  EXPECT_EQ(ranks[0]->lost(), (Lost{false, false, true}));
  EXPECT_EQ(ranks[1]->lost(), (Lost{false, false, true}));

  ranks[1]->stop(milliseconds(1000));
  EXPECT_TRUE(comes_true([&] { return ranks[0]->lost() == Lost{false, true, true}; }));
}

// The end of a communicator follows its abort at once. A busy store answers later than both wait.
TEST(Liveness, ARankThatLeavesBeforeTheStoreAnswersStillReportsItsFailure) {
  const auto store = c10::make_intrusive<SlowStore>();
  const Ranks ranks = three_ranks(store);
  ASSERT_TRUE(ranks[1]->look(milliseconds(5000)));
  store->open = false;
  std::this_thread::sleep_for(milliseconds(100)); // its thread waits for the store
  ranks[1]->fail({11, "", "rank 11 failed: no memory", ""}, milliseconds(50));
  EXPECT_TRUE(ranks[1]->failed());
  ranks[1]->stop(milliseconds(50));
  store->open = true;
  ASSERT_TRUE(comes_true([&] { return ranks[0]->failed(); }));
  EXPECT_EQ(ranks[0]->cause().text, "rank 11 failed: no memory");
}

// If a rank's thread was delayed, its peers may have its value and be in a later operation. Only a
// peer that is in a later operation without this rank's value is an error.
TEST(Liveness, APeerThatHasExchangedAsOftenMayHaveGoneOn) {
  const Ranks ranks = three_ranks();
  std::vector<std::shared_ptr<GroupProgress>> groups;
  for (const auto& rank : ranks) {
    groups.push_back(rank->add_group("world"));
  }
  const auto other_than_mine = [&](uint64_t sequence, const std::string& operation,
                                   uint64_t exchanges) {
    {
      const std::lock_guard<std::mutex> lock(groups[1]->mutex);
      groups[1]->sequence = sequence;
      groups[1]->operation = operation;
      groups[1]->exchanges = exchanges;
    }
    EXPECT_TRUE(ranks[1]->look(milliseconds(5000)));
    EXPECT_TRUE(ranks[0]->look(milliseconds(5000)));
    return ranks[0]->describe_other(*groups[0], {0, 1, 2});
  };
  groups[0]->sequence = 7;
  groups[0]->operation = "all_gather_object \"mine\"";
  groups[0]->exchanges = 3;
  EXPECT_EQ(other_than_mine(6, "barrier \"before\"", 2), "");
  EXPECT_EQ(other_than_mine(7, "all_gather_object \"mine\"", 3), "");
  EXPECT_EQ(other_than_mine(9, "barrier \"later\"", 3), "");
  EXPECT_EQ(other_than_mine(9, "all_gather_object \"later\"", 4), "");
  EXPECT_EQ(other_than_mine(9, "barrier \"later\"", 2),
            "rank 11 has moved on to barrier \"later\", rank 10 has all_gather_object \"mine\"");
  EXPECT_EQ(other_than_mine(7, "barrier \"other\"", 2),
            "rank 11 has barrier \"other\", rank 10 has all_gather_object \"mine\"");
}

} // namespace hasten::detail
