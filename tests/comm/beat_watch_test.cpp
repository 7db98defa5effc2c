// Simulated worlds of many ranks: a clock and a store of heartbeats, no thread and no process.
// Every rank writes heartbeats, and some ranks read them.
#include "meet/beat_watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <queue>
#include <random>

namespace hasten::detail {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct SimulatedWorld {
  int size = 0;
  int dead = -1; // from dead_at on
  milliseconds dead_at{0};
  // What the simulation measured.
  std::map<int, milliseconds> named{}; // lost rank -> when another rank first reported it
  size_t most_read = 0; // heartbeats in one exchange
  double read_per_second = 0; // by all ranks
};

// 16 ranks read heartbeats: neighbours of `dead` and some spread over the world. Each exchange is
// up to half an interval late, as with a busy store.
static void simulate(SimulatedWorld& world, milliseconds length) {
  const CommClock::time_point start{};
  std::vector<uint64_t> beats(static_cast<size_t>(world.size), 0);
  std::map<int, BeatWatch> watches;
  for (int i = 0; i < 8; ++i) {
    for (const int rank : {i * world.size / 8, (std::max(world.dead, 0) + world.size - 1 - i)}) {
      watches.emplace(rank % world.size,
                      BeatWatch(rank % world.size, world.size, seconds(5), start));
    }
  }
  const milliseconds interval = watches.begin()->second.interval();
  std::mt19937 random(7);
  std::uniform_int_distribution<int64_t> late(0, interval.count() / 2);
  using Exchange = std::pair<milliseconds, int>; // time, rank
  std::priority_queue<Exchange, std::vector<Exchange>, std::greater<>> next;
  for (int rank = 0; rank < world.size; ++rank) {
    next.emplace(milliseconds(late(random)), rank);
  }
  size_t read = 0;
  while (next.top().first < length) {
    const auto [now, rank] = next.top();
    next.pop();
    if (rank == world.dead && now >= world.dead_at) {
      continue;
    }
    ++beats[static_cast<size_t>(rank)];
    next.emplace(now + interval + milliseconds(late(random)), rank);
    const auto watch = watches.find(rank);
    if (watch == watches.end()) {
      continue;
    }
    const std::vector<int> due = watch->second.due(false, start + now);
    std::vector<std::string> values;
    for (const int peer : due) {
      values.push_back(std::to_string(beats[static_cast<size_t>(peer)]));
    }
    watch->second.merge(due, std::move(values), start + now);
    for (const int peer : due) {
      if (watch->second.silence(peer) > watch->second.limit() * 4 / 5) {
        world.named.emplace(peer, now);
      }
    }
    world.most_read = std::max(world.most_read, due.size());
    read += due.size();
  }
  world.read_per_second = static_cast<double>(read) * world.size /
                          static_cast<double>(watches.size()) /
                          std::chrono::duration<double>(length).count();
}

TEST(BeatWatch, WorldsOfManyRanksThatLiveAreNotDeclaredDead) {
  for (const int size : {2, 64, 512, 1024, 2048}) {
    SimulatedWorld world{.size = size};
    simulate(world, seconds(120));
    EXPECT_TRUE(world.named.empty()) << size << " ranks: rank " << world.named.begin()->first
                                     << " after " << world.named.begin()->second.count() << " ms";
    EXPECT_LE(world.most_read, 63u) << size;
    EXPECT_LE(world.read_per_second, 70'000) << size;
  }
}

TEST(BeatWatch, OneThatFallsSilentIsNamedAloneWithinTheLimitOfItsWorld) {
  for (const int size : {2, 64, 512, 1024, 2048}) {
    SimulatedWorld world{.size = size, .dead = size / 2, .dead_at = seconds(30)};
    simulate(world, seconds(120));
    ASSERT_EQ(world.named.size(), 1u) << size;
    EXPECT_EQ(world.named.begin()->first, world.dead);
    const auto after = world.named.begin()->second - world.dead_at;
    const BeatWatch watch(0, size, seconds(5), {});
    EXPECT_LE(after, watch.limit() + 2 * watch.interval()) << size;
    EXPECT_LE(watch.limit(), std::max(milliseconds(5000), milliseconds(5) * size));
  }
}

TEST(BeatWatch, AllAreReadWhereSomebodyAsksNotMoreOftenThanTheStoreCanBear) {
  const CommClock::time_point start{};
  BeatWatch watch(3, 1000, seconds(5), start);
  EXPECT_EQ(watch.due(true, start + seconds(10)).size(), 999u);
  EXPECT_EQ(watch.due(true, start + seconds(12)).size(), 63u);
  EXPECT_EQ(watch.due(true, start + seconds(16)).size(), 999u);
  EXPECT_EQ(watch.due(false, start + seconds(30)).front(), 4);
  EXPECT_EQ(BeatWatch(63, 64, seconds(5), start).due(false, start).size(), 63u);
}

TEST(BeatWatch, AfterAPauseOfTheWatcherNobodysSilenceCounts) {
  const CommClock::time_point start{};
  BeatWatch watch(0, 2, seconds(5), start);
  watch.merge({1}, {"a"}, start + milliseconds(250));
  watch.merge({1}, {"a"}, start + seconds(60)); // both were stopped
  EXPECT_EQ(watch.silence(1), CommClock::duration::zero());
  watch.merge({1}, {"a"}, start + seconds(60) + milliseconds(250));
  EXPECT_EQ(watch.silence(1), milliseconds(250));
}

} // namespace hasten::detail
