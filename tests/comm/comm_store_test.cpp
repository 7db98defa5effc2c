// Connections to torchrun's store. These tests act as torchrun's agent. c10d looks up the name of
// each address to which it connects. Here these look-ups can be slow, as if name servers did not
// answer.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "support/spawn.h"

namespace hasten {

using std::chrono::milliseconds;
using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::RankReport;
using testing_support::spawn;

// Number of look-ups of names for connections to `watched_port` in this process.
static std::atomic<int> watched_port{0};
static std::atomic<int> lookups{0};
static std::atomic<int> lookups_at_name_servers{0};
static std::atomic<int> first_slow_lookup{1'000'000}; // from 0

static int port_of(const sockaddr* address) {
  const auto* inet = reinterpret_cast<const sockaddr_in*>(address);
  const auto* inet6 = reinterpret_cast<const sockaddr_in6*>(address);
  return ntohs(address->sa_family == AF_INET6 ? inet6->sin6_port : inet->sin_port);
}

/// Replaces libc's function in the whole test program.
extern "C" int getnameinfo(const sockaddr* address, socklen_t size, char* host, socklen_t host_size,
                           char* service, socklen_t service_size, int flags) {
  if (watched_port != 0 && (flags & NI_NUMERICHOST) == 0 && port_of(address) == watched_port) {
    const bool fresh = (_res.options & RES_INIT) == 0; // all servers allowed
    lookups_at_name_servers += fresh || _res.nscount > 0;
    if (lookups++ >= first_slow_lookup) {
      std::this_thread::sleep_for(milliseconds(1'300));
    }
    flags |= NI_NUMERICHOST; // an answer, because c10d stops looking up names after an error
  }
  static const auto libc =
      reinterpret_cast<decltype(&getnameinfo)>(::dlsym(RTLD_NEXT, "getnameinfo"));
  return libc(address, size, host, host_size, service, service_size, flags);
}

/// The ranks of a world whose store this process serves.
static std::vector<RankReport> spawn_with_agent(int world_size, const std::string& function,
                                                const testing_support::Fault& fault = {},
                                                const std::string& secret = "") {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  const c10d::TCPStore agent("127.0.0.1", options);
  return spawn(world_size, function, fault,
               {.environment = {{"MASTER_PORT", std::to_string(agent.getPort())},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                {"HASTEN_SECRET", secret}}});
}

static std::shared_ptr<Communicator> watched_comm(const FaultRank& rank) {
  watched_port = rank.world().master_port;
  CommunicatorOptions options;
  options.timeout = milliseconds(20'000);
  options.heartbeat_timeout = milliseconds(1'000);
  auto comm = Communicator::create(rank.world(), options);
  comm->barrier("meet");
  return comm;
}

HASTEN_RANK_FUNCTION(CommConnectsTheWatchSlowly) {
  if (rank.world().rank == 1) {
    first_slow_lookup = 1; // the look-ups for the store's connection stay fast
  }
  const auto comm = watched_comm(rank);
  rank.report("lookups", lookups.load());
  try {
    rank.fault_here();
    comm->barrier("work");
  } catch (const std::exception& error) {
    comm->abort(error);
    throw;
  }
}

TEST(CommStore, SlowConnectionDelaysTheStartAndIsNotTakenForALostStore) {
  const auto ranks =
      spawn_with_agent(2, "CommConnectsTheWatchSlowly", {.kind = FaultKind::fail, .rank = 0});
  EXPECT_NE(ranks[1].error.find("barrier \"work\": rank 0 failed: planted failure"),
            std::string::npos)
      << ranks[1].error;
  EXPECT_EQ(ranks[1].values.value("lookups", 0), 2);
}

HASTEN_RANK_FUNCTION(CommConnects) {
  watched_comm(rank)->close();
  rank.report("lookups", lookups.load());
  rank.report("at_name_servers", lookups_at_name_servers.load());
}

TEST(CommStore, ConnectingAsksNoNameServer) {
  for (const RankReport& report : spawn_with_agent(2, "CommConnects")) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.values.value("lookups", 0), 2); // this test sees them
    EXPECT_EQ(report.values.value("at_name_servers", -1), 0);
  }
}

HASTEN_RANK_FUNCTION(CommReadsAStrangeFailure) {
  const auto comm = watched_comm(rank);
  if (rank.world().rank == 0) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(rank.world().master_port);
    const std::string record = "{\"text\": 7\x1b[31m";
    c10d::TCPStore("127.0.0.1", options).set("hasten/0/0/failure", {record.begin(), record.end()});
  }
  comm->all_gather_object(rank.world().rank, "first");
  std::this_thread::sleep_for(milliseconds(500));
  comm->barrier("work");
}

TEST(CommStore, FailureThatCannotBeReadIsShownAsItIs) {
  for (const RankReport& report : spawn_with_agent(2, "CommReadsAStrangeFailure")) {
    EXPECT_EQ(report.error_type, "hasten::CommunicationError");
    EXPECT_NE(report.error.find("a rank failed and wrote: {\"text\": 7?[31m"), std::string::npos)
        << report.error;
  }
}

TEST(CommStore, WithASecretWhatAStrangerWroteIsRefused) {
  for (const RankReport& report :
       spawn_with_agent(2, "CommReadsAStrangeFailure", {}, "0123456789abcdef")) {
    EXPECT_EQ(report.error_type, "hasten::CommunicationError");
    EXPECT_NE(report.error.find("was not written with this run's secret"), std::string::npos)
        << report.error;
  }
  for (const RankReport& report : spawn_with_agent(2, "CommConnects", {}, "0123456789abcdef")) {
    EXPECT_EQ(report.error, "");
  }
}

} // namespace hasten
