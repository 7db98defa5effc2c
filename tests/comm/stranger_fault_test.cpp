// Other users of this machine, and processes without the right secret, against a world of two.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/store_server.h"
#include "hasten/comm/communicator.h"
#include "meet/network_interface.h"
#include "support/spawn.h"
#include "support/stranger.h"

namespace hasten {

using std::chrono::milliseconds;
using testing_support::FaultRank;
using testing_support::RankReport;
using testing_support::spawn;
using testing_support::start_stranger;

/// The world of the first two processes. The third process is not part of it.
static World world_of_two(const FaultRank& rank) {
  World world = rank.world();
  world.world_size = world.local_world_size = 2;
  return world;
}

static void train(Communicator& comm, int steps) {
  torch::Tensor tensor = torch::full({1000}, comm.rank() + 1.0);
  for (int i = 0; i < steps; ++i) {
    comm.all_reduce(tensor, ReduceOp::AVG, "step " + std::to_string(i % 7));
    comm.all_gather_object(i, "numbers");
  }
  EXPECT_EQ(tensor[0].item<double>(), (comm.world_size() + 1) / 2.0);
}

/// Kills a process at the end of the scope.
struct KilledAtTheEnd {
  explicit KilledAtTheEnd(pid_t of) : pid(of) {}
  ~KilledAtTheEnd() {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  KilledAtTheEnd(const KilledAtTheEnd&) = delete;
  KilledAtTheEnd& operator=(const KilledAtTheEnd&) = delete;
  const pid_t pid;
};

HASTEN_RANK_FUNCTION(JoinsAsAStranger) {
  if (rank.world().rank < 2) {
    const auto comm = Communicator::create(world_of_two(rank), {});
    train(*comm, 100);
    comm->close();
    return;
  }
  ASSERT_EQ(::setgid(65534), 0);
  ASSERT_EQ(::setuid(65534), 0);
  World world = world_of_two(rank);
  world.rank = 1;
  Communicator::create(world, {.timeout = milliseconds(5'000)});
}

TEST(Stranger, NobodyElsesProcessJoinsAsARank) {
  if (!testing_support::can_be_a_stranger()) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  const auto ranks = spawn(3, "JoinsAsAStranger");
  EXPECT_EQ(ranks[0].error, "");
  EXPECT_EQ(ranks[1].error, "");
  EXPECT_NE(ranks[2].error, "");
}

HASTEN_RANK_FUNCTION(TrainsAmongStrangers) {
  const World world = rank.world();
  std::optional<KilledAtTheEnd> flood;
  const auto comm = Communicator::create(world, {});
  if (world.rank == 0) {
    const detail::StoreAddress store{.socket = "hasten1-" + std::to_string(::geteuid()) + "-" +
                                               std::to_string(world.master_port)};
    EXPECT_TRUE(detail::try_connect(store)); // the socket exists
    const std::set<int> ports = detail::listening_ports(); // Gloo's
    EXPECT_FALSE(ports.empty());
    flood.emplace(start_stranger([&]() -> int {
      const std::string junk(100'000, 'j');
      while (true) {
        for (int i = 0; i < 100; ++i) {
          const detail::FileDescriptor at_store = detail::try_connect(store);
          ::send(at_store.get(), junk.data(), junk.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        for (const int port : ports) {
          const auto at_gloo = detail::try_connect({.host = "127.0.0.1", .port = port});
          ::send(at_gloo.get(), junk.data(), 100, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
      }
    }));
  }
  train(*comm, 300);
  comm->close();
}

TEST(Stranger, AnothersFloodDoesNotHoldUpTraining) {
  if (!testing_support::can_be_a_stranger()) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  for (const RankReport& report :
       spawn(2, "TrainsAmongStrangers", {}, {.deadline = std::chrono::seconds(120)})) {
    EXPECT_EQ(report.error, "");
    EXPECT_FALSE(report.timed_out);
  }
}

HASTEN_RANK_FUNCTION(StartsAGroupBesideAStranger) {
  const auto comm = Communicator::create(rank.world(), {.backend = "gloo"});
  std::optional<KilledAtTheEnd> guest;
  if (rank.world().rank == 1) {
    const std::set<int> ports = detail::listening_ports();
    int ready[2];
    ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
    guest.emplace(start_stranger([&]() -> int {
      std::vector<detail::FileDescriptor> connections; // open while the process waits
      for (const int port : ports) {
        connections.push_back(detail::try_connect({.host = "127.0.0.1", .port = port}));
      }
      ::write(ready[1], "r", 1);
      ::pause();
      return 0;
    }));
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    EXPECT_EQ(detail::stranger_at(ports), 65534u);
    EXPECT_EQ(detail::stranger_at({}), std::nullopt);
  }
  comm->barrier("the guest is there");
  const auto other = comm->duplicate({.name = "other"}); // over Gloo, too
  other->barrier("not reached");
}

TEST(Stranger, OneThatIsConnectedToGlooEndsTheStartOnAllRanks) {
  if (!testing_support::can_be_a_stranger()) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  for (const RankReport& report : spawn(2, "StartsAGroupBesideAStranger")) {
    EXPECT_NE(report.error.find("a process of another user (uid 65534) is connected"),
              std::string::npos)
        << report.error;
    EXPECT_FALSE(report.timed_out);
  }
}

// As on several hosts, the ranks connect to the store over TCP, by this host's name.
HASTEN_RANK_FUNCTION(MeetsOverTcp) {
  World world = rank.world();
  char name[256] = "";
  ASSERT_EQ(::gethostname(name, sizeof name - 1), 0);
  world.master_addr = name;
  world.local_world_size = 1;
  if (const char* secret = std::getenv("SECRET_OF_RANK_ONE");
      secret != nullptr && world.rank == 1) {
    ::setenv("HASTEN_SECRET", secret, 1);
  }
  const auto comm = Communicator::create(world, {.timeout = milliseconds(10'000)});
  train(*comm, 5);
  comm->close();
}

TEST(StoreOverTcp, RanksMeetWithOneSecretAndWithNone) {
  for (const char* secret : {"0123456789abcdef", ""}) {
    for (const RankReport& report :
         spawn(3, "MeetsOverTcp", {}, {.environment = {{"HASTEN_SECRET", secret}}})) {
      EXPECT_EQ(report.error, "");
    }
  }
}

TEST(StoreOverTcp, ARankWithAnotherSecretOrNoneIsRefused) {
  for (const char* other : {"fedcba9876543210", ""}) {
    const auto ranks = spawn(
        2, "MeetsOverTcp", {},
        {.deadline = std::chrono::seconds(60),
         .environment = {{"HASTEN_SECRET", "0123456789abcdef"}, {"SECRET_OF_RANK_ONE", other}}});
    EXPECT_NE(ranks[0].error.find("missing 1"), std::string::npos) << ranks[0].error;
    EXPECT_NE(ranks[1].error.find("has another secret"), std::string::npos) << ranks[1].error;
    EXPECT_EQ(ranks[1].error.find(other[0] != '\0' ? other : "0123456789"), std::string::npos);
  }
}

} // namespace hasten
