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

// Ranks that share a host.
static int ranks_a_host(int size) { return size < 16 ? 1 : 8; }

static std::vector<std::vector<int>> hosts_of(int size) {
  std::vector<std::vector<int>> hosts;
  for (int rank = 0; rank < size; ++rank) {
    if (rank % ranks_a_host(size) == 0) {
      hosts.emplace_back();
    }
    hosts.back().push_back(rank);
  }
  return hosts;
}

static BeatWatch watch_of(int rank, int size) {
  return {rank, size, in_place_on_next_hosts(rank, hosts_of(size)), seconds(5), {}};
}

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
    const int before = (i + 1) * ranks_a_host(world.size); // in its place on the hosts before
    for (const int rank : {i * world.size / 8, std::max(world.dead, 0) + 8 * world.size - before}) {
      watches.emplace(rank % world.size, watch_of(rank % world.size, world.size));
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
    EXPECT_LE(world.most_read, 3u) << size;
    EXPECT_LE(world.read_per_second, 3'000) << size;
  }
}

TEST(BeatWatch, OneThatFallsSilentIsNamedAloneWithinTheLimitOfItsWorld) {
  for (const int size : {2, 64, 512, 1024, 2048}) {
    SimulatedWorld world{.size = size, .dead = size / 2, .dead_at = seconds(30)};
    simulate(world, seconds(120));
    ASSERT_EQ(world.named.size(), 1u) << size;
    EXPECT_EQ(world.named.begin()->first, world.dead);
    const auto after = world.named.begin()->second - world.dead_at;
    const BeatWatch watch = watch_of(0, size);
    EXPECT_LE(after, watch.limit() + 2 * watch.interval()) << size;
    EXPECT_LE(watch.limit(), std::max(milliseconds(5000), milliseconds(5) * size));
  }
}

TEST(BeatWatch, AllAreReadWhereSomebodyAsksNotMoreOftenThanTheStoreCanBear) {
  const CommClock::time_point start{};
  BeatWatch watch = watch_of(3, 1000);
  EXPECT_EQ(watch.due(true, start + seconds(10)).size(), 999u);
  EXPECT_EQ(watch.due(true, start + seconds(12)), (std::vector<int>{11, 19, 27}));
  EXPECT_EQ(watch.due(true, start + seconds(16)).size(), 999u);
  EXPECT_EQ(watch.due(false, start + seconds(30)).front(), 11);
}

TEST(BeatWatch, EachRankIsReadByThoseInItsPlaceOnThreeOtherHosts) {
  const std::vector<std::vector<std::vector<int>>> worlds = {
      {{0, 2, 4}, {1, 3, 5}},       {{0, 1, 2, 3, 4}, {5}, {6, 7}, {8, 9, 10}, {11}},
      {{7}, {0, 1, 2, 3, 4, 5, 6}}, {{0}, {1}, {2}, {3}, {4}, {5}},
      {{0, 1, 2, 3, 4, 5, 6, 7}},
  };
  for (const auto& hosts : worlds) {
    std::map<int, std::vector<int>> readers;
    for (const auto& host : hosts) {
      for (const int rank : host) {
        for (const int other : in_place_on_next_hosts(rank, hosts)) {
          readers[other].push_back(rank);
          EXPECT_EQ(std::ranges::count(host, other), 0) << "on the same host";
        }
      }
    }
    for (const auto& host : hosts) {
      for (const int rank : host) {
        EXPECT_EQ(readers[rank].size(), std::min<size_t>(3, hosts.size() - 1)) << rank;
      }
    }
  }
}

TEST(BeatWatch, ARankThatWaitsReadsTheFirstOfItsGroupAndTheFirstReadsAll) {
  BeatWatch first = watch_of(8, 32);
  first.waits_for({8, 9, 31});
  EXPECT_EQ(first.due(false, {}), (std::vector<int>{0, 9, 16, 24, 31}));
  EXPECT_EQ(first.due(false, {}), (std::vector<int>{0, 16, 24})) << "it waits no more";
  BeatWatch last = watch_of(31, 32);
  last.waits_for({8, 9, 31});
  EXPECT_EQ(last.due(false, {}), (std::vector<int>{7, 8, 15, 23}));
}

TEST(BeatWatch, AfterAPauseOfTheWatcherNobodysSilenceCounts) {
  const CommClock::time_point start{};
  BeatWatch watch = watch_of(0, 2);
  watch.merge({1}, {"a"}, start + milliseconds(250));
  watch.merge({1}, {"a"}, start + seconds(60)); // both were stopped
  EXPECT_EQ(watch.silence(1), CommClock::duration::zero());
  watch.merge({1}, {"a"}, start + seconds(60) + milliseconds(250));
  EXPECT_EQ(watch.silence(1), milliseconds(250));
}

} // namespace hasten::detail
