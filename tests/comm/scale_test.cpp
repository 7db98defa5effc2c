// What the store of a large world has to answer: ranks without processes take turns with one store
// that counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "groups/group_core.h"
#include "meet/beat_watch.h"
#include "meet/hellos.h"
#include "meet/world_link.h"

namespace hasten::detail {

constexpr int kRanksOfHost = 8;
const std::atomic<bool> kNotCancelled{false};

/// Counts the keys that it is asked for, and the bytes that it gives.
class CountingStore final : public c10d::HashStore {
 public:
  int64_t keys = 0;
  int64_t bytes = 0;

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++keys;
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++keys;
    auto value = HashStore::get(key);
    bytes += std::ssize(value);
    return value;
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    ++keys;
    HashStore::append(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    ++keys;
    return HashStore::compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++keys;
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& of) override {
    keys += std::ssize(of);
    return HashStore::check(of);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& of) override {
    std::vector<std::vector<uint8_t>> values;
    for (const std::string& key : of) {
      values.push_back(get(key));
    }
    return values;
  }
  bool deleteKey(const std::string& key) override {
    ++keys;
    return HashStore::deleteKey(key);
  }
};

/// What a rank costs in a world of that many hosts.
struct Cost {
  double keys = 0;
  double bytes = 0;
  int64_t left = 0; // keys in the store at the end
};

using Meeting = std::function<void(c10d::Store&, const std::vector<int>& ranks)>;

Cost cost_of(const Meeting& meeting, int hosts) {
  CountingStore store;
  std::vector<int> ranks(static_cast<size_t>(hosts * kRanksOfHost));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::ranges::shuffle(ranks, std::mt19937(7)); // the order in which they come
  meeting(store, ranks);
  const auto size = static_cast<double>(ranks.size());
  return {static_cast<double>(store.keys) / size, static_cast<double>(store.bytes) / size,
          store.getNumKeys()};
}

bool keys_grow(const Cost& few_hosts, const Cost& many_hosts) {
  return many_hosts.keys > 1.1 * few_hosts.keys;
}

void greet(c10d::Store& store, const std::vector<int>& ranks) {
  ArrivedHellos arrived;
  arrived.hellos.resize(ranks.size());
  std::vector<Hello> own(ranks.size());
  for (const int rank : ranks) {
    World world;
    world.rank = rank;
    world.world_size = static_cast<int>(ranks.size());
    Hello& hello = own[static_cast<size_t>(rank)];
    hello = own_hello(world, "cpu", "gloo");
    hello.process_host = hello.network_host = "host " + std::to_string(rank / kRanksOfHost);
    say_hello(store, hello);
  }
  answer_hellos(store, arrived);
  for (const int rank : ranks) {
    const auto all = read_answer(store, kNotCancelled, own[static_cast<size_t>(rank)], {});
    ASSERT_TRUE(all);
    if (rank % 100 == 7) {
      EXPECT_EQ(nlohmann::json(*all), nlohmann::json(own));
    }
  }
}

/// Asks the ranks in turns until each has said once that it is ready.
void take_turns(std::vector<int> waiting, const std::function<bool(int rank)>& ready) {
  for (int turn = 0; turn < 3; ++turn) {
    std::erase_if(waiting, ready);
  }
  EXPECT_TRUE(waiting.empty());
}

void exchange(c10d::Store& store, const std::vector<int>& ranks) {
  std::vector<StoreBytes> expected;
  std::vector<ValueExchange> open;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    expected.emplace_back(10 + rank % 7, static_cast<uint8_t>(rank));
    open.push_back(exchange_values("values", static_cast<int>(rank), static_cast<int>(ranks.size()),
                                   expected.back()));
  }
  take_turns(ranks, [&](int rank) {
    const auto values = open[static_cast<size_t>(rank)](store, kNotCancelled);
    EXPECT_TRUE(!values || *values == expected);
    return values.has_value();
  });
}

void shrink(c10d::Store& store, std::vector<int> ranks) {
  std::vector<bool> lost(ranks.size());
  lost[3] = true;
  std::vector<MembersDecision> open;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    open.push_back(decide_members(
        static_cast<int>(rank), [lost] { return lost; }, CommClock::time_point::max()));
  }
  std::erase(ranks, 3);
  std::vector<int> expected = ranks;
  std::ranges::sort(expected);
  take_turns(ranks, [&](int rank) {
    const auto members = open[static_cast<size_t>(rank)](store, kNotCancelled);
    EXPECT_TRUE(!members || *members == expected);
    return members.has_value();
  });
}

TEST(Scale, ARankAsksTheStoreForAsManyKeysOn64HostsAsOn8) {
  const std::pair<Meeting, int> meetings[] = {{greet, 250}, {exchange, 25}, {shrink, 8}};
  for (const auto& [meeting, bytes_of_a_rank] : meetings) {
    const Cost many = cost_of(meeting, 64);
    EXPECT_FALSE(keys_grow(cost_of(meeting, 8), many));
    EXPECT_LE(many.keys, 10);
    EXPECT_LE(many.bytes, bytes_of_a_rank * 64 * kRanksOfHost);
  }
  EXPECT_EQ(cost_of(exchange, 8).left, 0);
  CountingStore store;
  exchange(store, {0}); // of a world that has shrunk
}

TEST(Scale, AnExchangeOfEachRankWithEachWouldGrow) {
  const auto each_with_each = [](c10d::Store& store, const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      store.set("value/" + std::to_string(rank), std::string("a"));
    }
    for (size_t reader = 0; reader < ranks.size(); ++reader) {
      for (const int rank : ranks) {
        store.get("value/" + std::to_string(rank));
      }
    }
  };
  EXPECT_TRUE(keys_grow(cost_of(each_with_each, 8), cost_of(each_with_each, 64)));
}

} // namespace hasten::detail
