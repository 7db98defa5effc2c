// SocketStore as a c10d store: it behaves like c10d's own stores.
#include "meet/socket_store.h"

#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hasten/base/error.h"
#include "hasten/base/store_server.h"
#include "meet/sealed_store.h"

namespace hasten::detail {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

static StorePtr connect_to(const StoreServer& server) {
  static const std::atomic<bool> never{false};
  return c10::make_intrusive<SocketStore>(server.address(),
                                          StoreClock::now() + std::chrono::seconds(60), never);
}

static StoreAddress test_address(bool tcp) {
  StoreAddress address;
  if (tcp) {
    address.host = "127.0.0.1";
    address.key.fill(1);
  } else {
    address.socket = unique_socket_name("hasten-test-");
  }
  return address;
}

static StorePtr own_tcp_store() {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

static std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

/// The result of each call of a script.
static std::vector<std::string> transcript(c10d::Store& s) {
  std::vector<std::string> did;
  const auto note = [&](const auto& value) {
    if constexpr (std::is_convertible_v<decltype(value), std::string>) {
      did.push_back(value);
    } else {
      did.push_back(std::to_string(value));
    }
  };
  const auto missing = [&](const auto& call) {
    const auto before = s.getTimeout();
    s.setTimeout(milliseconds(20));
    try {
      call();
      note("there");
    } catch (const c10::DistStoreError&) {
      note("DistStoreError");
    }
    s.setTimeout(before);
  };
  const int64_t keys = s.getNumKeys(); // TCPStore has an internal key
  s.set("a", "1");
  s.set("a", std::string("zero\0byte", 9));
  note(s.get_to_str("a"));
  s.set("empty", "");
  note(s.get_to_str("empty"));
  note(s.check({"a", "empty"}));
  note(s.check({"a", "no"}));
  note(s.add("count", 5));
  note(s.add("count", -7));
  note(s.get_to_str("count"));
  s.set("number", "40");
  note(s.add("number", 2));
  note(s.add("count", 0));
  note(s.compareSet("cas", "other", "x"));
  note(s.check({"cas"}));
  note(s.compareSet("cas", "", "first"));
  note(s.compareSet("cas", "", "second"));
  note(s.compareSet("cas", "wrong", "second"));
  note(s.compareSet("cas", "first", "second"));
  note(s.get_to_str("cas"));
  s.append("a", {'!', '!'});
  s.append("appended", {'n', 'e', 'w'});
  for (const auto& value : s.multiGet({"appended", "a", "empty"})) {
    note(text(value));
  }
  s.multiSet({"m1", "m2"}, {{'x'}, {}});
  note(s.get_to_str("m1") + "|" + s.get_to_str("m2"));
  note(s.getNumKeys() - keys);
  note(s.deleteKey("m1"));
  note(s.deleteKey("m1"));
  note(s.getNumKeys() - keys);
  s.wait({"a", "cas"});
  missing([&] { s.get("m1"); });
  missing([&] { s.wait({"a", "m1"}); });
  missing([&] { s.wait({"m1"}, milliseconds(20)); });
  missing([&] { s.multiGet({"a", "m1"}); });
  note(s.get_to_str("cas")); // the store still works
  note(s.hasExtendedApi());
  return did;
}

TEST(SocketStore, DoesWhatC10dsStoresDo) {
  c10d::HashStore reference;
  const auto expected = transcript(reference);
  EXPECT_EQ(transcript(*own_tcp_store()), expected);
  for (const bool tcp : {false, true}) {
    const StoreServer server(test_address(tcp));
    EXPECT_EQ(transcript(*connect_to(server)), expected);
    c10d::PrefixStore one("one", connect_to(server));
    one.set("a", "of one");
    const auto two = c10::make_intrusive<c10d::PrefixStore>("two", one.getUnderlyingStore());
    EXPECT_FALSE(two->check({"a"}));
    EXPECT_EQ(connect_to(server)->get_to_str("one/a"), "of one");
  }
}

TEST(SealedStore, DoesTheSameButForWhatNoHashCanFollow) {
  const auto inner = c10::make_intrusive<c10d::HashStore>();
  SealedStore store("run", inner, StoreKey{1});
  store.set("a", "1");
  EXPECT_EQ(store.get_to_str("a"), "1");
  EXPECT_NE(inner->get_to_str("run/a"), "1");
  EXPECT_EQ(store.compareSet("cas", "other", "x"), "other");
  EXPECT_FALSE(store.check({"cas"}));
  EXPECT_EQ(store.compareSet("cas", "", "first"), "first");
  EXPECT_EQ(store.compareSet("cas", "", "second"), "first");
  EXPECT_EQ(store.compareSet("cas", "wrong", "second"), "first");
  EXPECT_EQ(store.compareSet("cas", "first", "second"), "second");
  EXPECT_EQ(text(store.multiGet({"a", "cas"})[1]), "second");
  EXPECT_EQ(store.add("count", 2), 2);
  EXPECT_EQ(store.add("count", 3), 5);
  EXPECT_FALSE(store.hasExtendedApi());
}

TEST(SealedStore, ForgedMovedAndStrangersValuesAreRefused) {
  const auto inner = c10::make_intrusive<c10d::HashStore>();
  SealedStore store("run", inner, StoreKey{1});
  SealedStore other("run", inner, StoreKey{2});
  store.set("a", "1");
  inner->set("run/forged", std::vector<uint8_t>{'1'});
  inner->set("run/moved", inner->get("run/a"));
  other.set("other", "1");
  std::vector<uint8_t> changed = inner->get("run/a");
  changed.back() ^= 1;
  inner->set("run/changed", changed);
  for (const char* key : {"forged", "moved", "other", "changed"}) {
    EXPECT_THROW(store.get(key), CommunicationError) << key;
    EXPECT_THROW(store.multiGet({"a", key}), CommunicationError) << key;
    EXPECT_THROW(store.compareSet(key, "x", "y"), CommunicationError) << key;
  }
}

TEST(SocketStore, AValueOfAnotherConnectionEndsAWait) {
  const StoreServer server(test_address(false));
  const StorePtr reader = connect_to(server);
  const StorePtr copy = reader->clone();
  std::thread writer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    copy->set("late", "here");
  });
  EXPECT_EQ(reader->get_to_str("late"), "here");
  writer.join();
}

TEST(SocketStore, AServerThatIsGoneIsAnErrorOfTheNetwork) {
  auto server = std::make_unique<StoreServer>(test_address(false));
  const StorePtr store = connect_to(*server);
  store->set("a", "1");
  server.reset();
  EXPECT_THROW(store->set("a", "2"), c10::DistNetworkError);
  EXPECT_THROW(store->get("a"), c10::DistNetworkError);
}

TEST(SocketStore, SixteenMegabytesGoThroughAndTooMuchIsRefused) {
  for (const bool tcp : {false, true}) {
    const StoreServer server(test_address(tcp));
    const StorePtr store = connect_to(server);
    const std::vector<uint8_t> large(16 << 20, 7);
    for (const char* key : {"1", "2", "3", "4"}) {
      store->set(key, large);
    }
    EXPECT_EQ(store->get("2"), large);
    EXPECT_THROW(store->set("5", std::vector<uint8_t>(StoreChannel::kMaxFrame)), Error);
    EXPECT_THROW(store->multiGet({"1", "2", "3", "4"}), Error); // 64 MiB and heads
    EXPECT_TRUE(store->check({"4"}));
    EXPECT_FALSE(store->check({"5"}));
  }
}

TEST(SocketStore, ThreadsShareOneConnection) {
  const StoreServer server(test_address(false));
  const StorePtr store = connect_to(server);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        store->add("sum", 1);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(store->add("sum", 0), 2000);
}

} // namespace hasten::detail
