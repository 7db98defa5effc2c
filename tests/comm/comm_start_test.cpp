#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/comm/backend.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/device.h"
#include "support/spawn.h"

namespace hasten {

using std::chrono::milliseconds;
using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::RankReport;
using testing_support::spawn;

HASTEN_RANK_FUNCTION(CommOfMixedDevices) {
  CommunicatorOptions options;
  options.device = rank.world().rank == 1 ? at::kCUDA : at::kCPU;
  Communicator::create(rank.world(), options);
}

TEST(CommStart, RanksOfAnotherDeviceKindAreNamedOnAllRanks) {
  for (const RankReport& report : spawn(3, "CommOfMixedDevices")) {
    EXPECT_EQ(report.error_type, "hasten::InputError");
    EXPECT_NE(report.error.find("device kind: rank 1 has cuda, rank 0 has cpu"), std::string::npos)
        << report.error;
  }
}

HASTEN_RANK_FUNCTION(CommOnTheCpu) {
  const at::Device device = detail::choose_device("cpu", rank.world(), false).device;
  const auto comm = Communicator::create(rank.world(), {.device = device});
  comm->all_reduce(at::ones({4}), ReduceOp::SUM, "sum");
  std::ifstream maps("/proc/self/maps");
  rank.report("maps", std::string(std::istreambuf_iterator<char>(maps), {}));
  comm->close();
}

TEST(CommStart, ARunOnTheCpuMapsNothingOfCuda) {
  for (const RankReport& report : spawn(2, "CommOnTheCpu")) {
    const std::string maps = report.values.value("maps", std::string());
    EXPECT_NE(maps.find("libtorch_cpu.so"), std::string::npos);
    for (const char* library : {"libtorch_cuda", "libc10_cuda", "libhasten_nccl", "libnccl"}) {
      EXPECT_EQ(maps.find(library), std::string::npos) << library;
    }
  }
}

HASTEN_RANK_FUNCTION(CommOfMixedBackends) {
  register_backend("other", backend_factory("gloo"));
  Communicator::create(rank.world(), {.backend = rank.world().rank == 1 ? "other" : "gloo"});
}

TEST(CommStart, RanksOfAnotherBackendAreNamedOnAllRanks) {
  for (const RankReport& report : spawn(3, "CommOfMixedBackends")) {
    EXPECT_EQ(report.error_type, "hasten::InputError");
    EXPECT_NE(report.error.find("back end: rank 1 has other, rank 0 has gloo"), std::string::npos)
        << report.error;
  }
}

/// One rank differs, and arrives last. Reports the seconds from then on.
static void create_differently(FaultRank& rank, const char* variable,
                               const std::function<void(CommunicatorOptions&)>& change = {}) {
  CommunicatorOptions options;
  ::unsetenv("HASTEN_COMM_BACKEND"); // with which the tests run on Gloo
  if (rank.world().rank == 1) {
    std::this_thread::sleep_for(milliseconds(200));
    if (change) {
      change(options);
    } else {
      ::setenv(variable, std::string(variable) == "HASTEN_COMM_CHECK" ? "1" : "gloo", 1);
    }
  }
  const auto start = std::chrono::steady_clock::now();
  try {
    Communicator::create(rank.world(), options)->barrier("meet");
  } catch (...) {
    rank.report("seconds",
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    throw;
  }
}

HASTEN_RANK_FUNCTION(CommOfMixedHostBackends) { create_differently(rank, "HASTEN_COMM_BACKEND"); }
HASTEN_RANK_FUNCTION(CommOfMixedChecks) { create_differently(rank, "HASTEN_COMM_CHECK"); }
HASTEN_RANK_FUNCTION(CommOfMixedSums) {
  create_differently(rank, "", [](CommunicatorOptions& options) { options.sum_in_fp32 = true; });
}
HASTEN_RANK_FUNCTION(CommOfMixedNames) {
  create_differently(rank, "", [](CommunicatorOptions& options) { options.name = "mine"; });
}

TEST(CommStart, EveryDifferenceThatDecidesHowRanksCommunicateIsNamedAtOnce) {
  for (const auto& [function, text] : std::vector<std::pair<std::string, std::string>>{
           {"CommOfMixedHostBackends",
            "HASTEN_COMM_BACKEND or backend: rank 1 has gloo, rank 0 has auto"},
           {"CommOfMixedChecks",
            "HASTEN_COMM_CHECK or check_shapes: rank 1 has always, rank 0 has first"},
           {"CommOfMixedSums", "sum_in_fp32: rank 1 has true, rank 0 has false"},
           {"CommOfMixedNames", "name of the group: rank 1 has mine, rank 0 has world"}}) {
    for (const RankReport& report : spawn(2, function)) {
      EXPECT_EQ(report.error_type, "hasten::InputError") << function;
      EXPECT_NE(report.error.find(text), std::string::npos) << report.error;
      EXPECT_LT(report.values.value("seconds", 99.0), 5) << function; // a second on an idle machine
    }
  }
}

HASTEN_RANK_FUNCTION(CommOfMixedWorldSizes) {
  World world = rank.world();
  world.world_size += world.rank;
  world.local_world_size = world.world_size;
  CommunicatorOptions options;
  options.timeout = milliseconds(10'000);
  Communicator::create(world, options);
}

TEST(CommStart, AnotherWorldSizeIsNamedAtOnce) {
  for (const RankReport& report : spawn(2, "CommOfMixedWorldSizes")) {
    EXPECT_NE(report.error.find("world size: rank 1 has 3, rank 0 has 2"), std::string::npos)
        << report.error;
  }
}

HASTEN_RANK_FUNCTION(CommWithoutOneRank) {
  CommunicatorOptions options;
  options.timeout = milliseconds(1'000);
  if (rank.world().rank != 1) {
    Communicator::create(rank.world(), options);
  }
}

TEST(CommStart, RanksThatDoNotArriveAreNamedAtTheTimeout) {
  const auto ranks = spawn(3, "CommWithoutOneRank");
  for (const size_t rank : {0, 2}) {
    EXPECT_NE(ranks[rank].error.find("within 1000 ms: missing 1"), std::string::npos)
        << ranks[rank].error;
  }
}

HASTEN_RANK_FUNCTION(CommRankZeroIsTheFirstToGiveUp) {
  if (rank.world().rank != 1) {
    Communicator::create(rank.world(),
                         {.timeout = milliseconds(rank.world().rank == 0 ? 2'000 : 60'000)});
  }
}

TEST(CommStart, WhoStillWaitsWhenTheStoreEndsSaysSo) {
  const auto ranks = spawn(3, "CommRankZeroIsTheFirstToGiveUp");
  EXPECT_NE(ranks[0].error.find("within 2000 ms: missing 1"), std::string::npos) << ranks[0].error;
  EXPECT_NE(ranks[2].error.find("store of rank 0 is gone, but not all of 3 ranks have met"),
            std::string::npos)
      << ranks[2].error;
}

HASTEN_RANK_FUNCTION(CommWithoutAnInterfaceOnRankZero) {
  CommunicatorOptions options;
  options.backend = "gloo";
  options.interface_address = rank.world().rank == 0 ? "eth9" : "";
  Communicator::create(rank.world(), options);
}

TEST(CommStart, WhyRankZeroCannotConnectIsNamedByTheOthers) {
  for (const RankReport& report : spawn(3, "CommWithoutAnInterfaceOnRankZero")) {
    EXPECT_NE(report.error.find("interface_address=eth9 is no interface"), std::string::npos)
        << report.error;
  }
}

HASTEN_RANK_FUNCTION(CommRankZeroComesLate) {
  rank.fault_here();
  const auto comm = Communicator::create(rank.world(), {});
  comm->barrier("meet");
  comm->close();
}

TEST(CommStart, RankZeroMayStartLast) {
  for (const RankReport& report :
       spawn(2, "CommRankZeroComesLate",
             {.kind = FaultKind::late, .rank = 0, .delay = milliseconds(800)})) {
    EXPECT_EQ(report.error, "");
  }
}

HASTEN_RANK_FUNCTION(CommBothAreRankOne) {
  World world = rank.world();
  CommunicatorOptions options;
  options.timeout = milliseconds(1'500);
  world.rank = world.rank == 2 ? 1 : world.rank;
  Communicator::create(world, options);
}

TEST(CommStart, TwoProcessesWithOneRankAreAnError) {
  const auto ranks = spawn(3, "CommBothAreRankOne");
  const auto refused = [&](size_t process) {
    return ranks[process].error.find("two processes have RANK=1") != std::string::npos;
  };
  // The rank that came second.
  EXPECT_NE(refused(1), refused(2)) << ranks[1].error << "\n" << ranks[2].error;
}

HASTEN_RANK_FUNCTION(CommCreatesASecondWorld) {
  const auto comm = Communicator::create(rank.world(), {});
  comm->barrier("meet");
  try {
    Communicator::create(rank.world(), {.name = "second"});
  } catch (const InputError& error) {
    rank.report("error", error.what());
  }
  comm->barrier("the first is as it was");
  comm->close();
}

TEST(CommStart, ASecondWorldBesideTheFirstIsRefusedWithWhatToDo) {
  for (const RankReport& report : spawn(2, "CommCreatesASecondWorld")) {
    EXPECT_EQ(report.error, "");
    const std::string error = report.values.value("error", "");
    for (const char* part : {"this process is already in the world of 2 ranks at ",
                             "Accelerator b({}, a.communicator())"}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
  }
}

static void meet(const std::shared_ptr<Communicator>& comm) {
  torch::Tensor tensor = torch::ones({3});
  comm->all_reduce(tensor, ReduceOp::SUM, "sum");
  EXPECT_EQ(tensor[0].item<int>(), comm->world_size());
}

HASTEN_RANK_FUNCTION(CommClosesInAnyOrder) {
  const auto comm = Communicator::create(rank.world(), {});
  const auto other = comm->duplicate({.name = "other"});
  meet(comm);
  meet(other);
  rank.fault_here();
  // Rank 1 closes in the order of creation, all others in the reverse order.
  (rank.world().rank == 1 ? comm : other)->close();
  (rank.world().rank == 1 ? other : comm)->close();
}

TEST(CommEnd, GroupsCloseInAnyOrderAndRankZeroWaitsForTheLate) {
  for (const int late : {0, 2}) {
    const auto ranks = spawn(3, "CommClosesInAnyOrder",
                             {.kind = FaultKind::late, .rank = late, .delay = milliseconds(700)});
    for (const RankReport& report : ranks) {
      EXPECT_EQ(report.error, "");
      EXPECT_EQ(report.end.code, 0);
      EXPECT_FALSE(report.timed_out);
    }
  }
}

HASTEN_RANK_FUNCTION(CommLeavesAGroupBehind) {
  // Owned by a static object, which is destroyed after main.
  static std::shared_ptr<Communicator> kept;
  kept = Communicator::create(rank.world(), {});
  meet(kept);
}

TEST(CommEnd, AGroupThatIsLeftOpenDoesNotHoldUpOrCrashTheExit) {
  const auto start = std::chrono::steady_clock::now();
  for (const RankReport& report : spawn(2, "CommLeavesAGroupBehind")) {
    EXPECT_EQ(report.end.code, 0);
    EXPECT_EQ(report.end.signal, 0);
    EXPECT_FALSE(report.timed_out);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

HASTEN_RANK_FUNCTION(CommLeavesEarly) {
  CommunicatorOptions options;
  options.heartbeat_timeout = milliseconds(1'000);
  const auto comm = Communicator::create(rank.world(), options);
  meet(comm);
  if (rank.world().rank == 1) {
    comm->close();
    std::this_thread::sleep_for(milliseconds(1'500));
    return;
  }
  meet(comm);
}

TEST(CommEnd, ARankThatLeftIsNamedByThoseThatStillCommunicate) {
  const auto ranks = spawn(2, "CommLeavesEarly");
  EXPECT_NE(ranks[0].error.find("all_reduce \"sum\": rank 1 has left the world"), std::string::npos)
      << ranks[0].error;
}

} // namespace hasten
