#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/comm/communicator.h"
#include "support/spawn.h"

namespace hasten {

using std::chrono::milliseconds;
using testing_support::Fault;
using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::RankReport;
using testing_support::spawn;

static std::shared_ptr<Communicator> comm_of(const FaultRank& rank, milliseconds timeout,
                                             ShapeCheck check = ShapeCheck::first,
                                             milliseconds heartbeat_timeout = milliseconds(5'000),
                                             const std::string& backend = "auto") {
  CommunicatorOptions options;
  options.backend = backend;
  options.timeout = timeout;
  options.heartbeat_timeout = heartbeat_timeout;
  options.check_shapes = check;
  auto comm = Communicator::create(rank.world(), options);
  comm->barrier("meet");
  return comm;
}

static void sum_once(Communicator& comm) {
  torch::Tensor tensor = torch::ones({10'000});
  comm.all_reduce(tensor, ReduceOp::SUM, "bucket 3");
  EXPECT_EQ(tensor[0].item<int>(), comm.world_size());
}

HASTEN_RANK_FUNCTION(CommReduces) {
  const auto comm = comm_of(rank, milliseconds(60'000));
  rank.fault_here();
  sum_once(*comm);
  comm->close();
}

HASTEN_RANK_FUNCTION(CommReducesWithinThreeSeconds) {
  const auto comm = comm_of(rank, milliseconds(3'000));
  rank.fault_here();
  sum_once(*comm);
  comm->close();
}

HASTEN_RANK_FUNCTION(CommReducesWithShortBeats) {
  const auto comm = comm_of(rank, milliseconds(60'000), ShapeCheck::first, milliseconds(1'000));
  rank.fault_here();
  sum_once(*comm);
  comm->close();
}

HASTEN_RANK_FUNCTION(CommGathersJson) {
  const auto comm = comm_of(rank, milliseconds(60'000));
  rank.fault_here();
  comm->all_gather_object(1, "shapes");
  comm->close();
}

HASTEN_RANK_FUNCTION(CommNoticesAtTheNextCall) {
  const auto comm = comm_of(rank, milliseconds(60'000));
  rank.fault_here();
  std::this_thread::sleep_for(milliseconds(1'000));
  sum_once(*comm);
}

HASTEN_RANK_FUNCTION(CommCreatesTwoGroups) {
  const auto comm = comm_of(rank, milliseconds(60'000));
  rank.fault_here();
  comm->duplicate({.name = "second"})->barrier("meet");
}

/// Expects `text` in the error of every rank but `faulty`, and that each of them ended by itself
/// within `limit` seconds of the fault.
static void expect_named(const std::vector<RankReport>& ranks, size_t faulty,
                         const std::string& text, double limit) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i == faulty) {
      continue;
    }
    EXPECT_FALSE(ranks[i].timed_out) << "rank " << i;
    EXPECT_EQ(ranks[i].end.signal, 0) << "rank " << i;
    EXPECT_EQ(ranks[i].error_type, "hasten::CommunicationError");
    EXPECT_NE(ranks[i].error.find(text), std::string::npos)
        << "rank " << i << ": " << ranks[i].error;
    EXPECT_LT(ranks[i].seconds_after_fault, limit);
  }
}

TEST(CommFault, KilledRankIsNamedWithinFiveSecondsWhateverTheTimeout) {
  expect_named(spawn(3, "CommReduces", {.kind = FaultKind::kill, .rank = 1}), 1,
               "all_reduce \"bucket 3\": rank 1 died", 5);
}

TEST(CommFault, KilledRankZeroIsNamedThoughTheStoreGoesWithIt) {
  expect_named(spawn(3, "CommReduces", {.kind = FaultKind::kill, .rank = 0}), 0,
               "all_reduce \"bucket 3\": rank 0 died", 5);
}

TEST(CommFault, KilledRankIsNamedByThoseWhoWaitForSmallValues) {
  expect_named(spawn(3, "CommGathersJson", {.kind = FaultKind::kill, .rank = 2}), 2,
               "all_gather_object \"shapes\": rank 2 died", 5);
}

TEST(CommFault, KilledRankIsNamedByThoseWhoMakeAGroup) {
  expect_named(spawn(2, "CommCreatesTwoGroups", {.kind = FaultKind::kill, .rank = 1}), 1,
               "create \"second\": rank 1 died", 5);
}

TEST(CommFault, KilledRankIsNamedAtTheNextCallOfThoseThatCompute) {
  expect_named(spawn(2, "CommNoticesAtTheNextCall", {.kind = FaultKind::kill, .rank = 1}), 1,
               "all_reduce \"bucket 3\": rank 1 died", 5);
}

// Small and large data, copied and in place, in memory that comes and goes.
HASTEN_RANK_FUNCTION(CommRunsCollectivesUntilARankDies) {
  const auto comm = comm_of(rank, milliseconds(60'000));
  if (rank.is_faulty()) {
    std::thread([&rank] {
      std::this_thread::sleep_for(
          std::chrono::microseconds(std::atoi(std::getenv("HASTEN_KILL_AFTER_US"))));
      rank.fault_here();
    }).detach();
  }
  torch::Tensor shared;
  const torch::Tensor rows = comm->allocate_tensor(300'000, at::kFloat).view({3, 100'000});
  const torch::Tensor row = torch::zeros({100'000});
  while (true) {
    shared = comm->allocate_tensor(500'000, at::kFloat);
    for (int i = 0; i < 5; ++i) {
      comm->all_reduce(torch::ones({100}), ReduceOp::SUM, "small");
      const Work sum = comm->all_reduce_async(shared, ReduceOp::SUM, "in place");
      comm->all_gather_object(i, "value");
      comm->all_reduce(torch::ones({300'000}), ReduceOp::SUM, "copied");
      comm->reduce_scatter_async(row, rows, "rows").wait();
      comm->barrier("all");
    }
  }
}

// HASTEN_KILLS: how many.
TEST(CommFault, ARankKilledAtAnyMomentIsNamedAndLeavesNothing) {
  const auto files = [] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      names.insert(entry.path().filename());
    }
    return names;
  };
  const std::set<std::string> before = files();
  const char* wanted = std::getenv("HASTEN_KILLS");
  std::mt19937 random(20);
  double longest = 0;
  for (int i = 0; i < (wanted == nullptr ? 3 : std::atoi(wanted)); ++i) {
    const auto killed = static_cast<size_t>(random() % 3);
    const auto ranks =
        spawn(3, "CommRunsCollectivesUntilARankDies",
              {.kind = FaultKind::kill, .rank = static_cast<int>(killed)},
              {.environment = {{"HASTEN_KILL_AFTER_US", std::to_string(random() % 50'000)}}});
    expect_named(ranks, killed, "rank " + std::to_string(killed) + " died", 5);
    for (const RankReport& rank : ranks) {
      longest = std::max(longest, rank.seconds_after_fault);
    }
  }
  EXPECT_EQ(files(), before);
  RecordProperty("longest_seconds", std::to_string(longest));
  std::cout << "named within " << longest << " s\n";
}

// Long before the timeout of 60 s; SpawnWorldOptions::deadline is 30 s.
TEST(CommFault, FrozenRankIsNamedWithinTheHeartbeatLimitWhateverTheTimeout) {
  for (const size_t frozen : {1, 0}) { // rank 0 serves the store
    const auto ranks = spawn(3, "CommReducesWithShortBeats",
                             {.kind = FaultKind::freeze, .rank = static_cast<int>(frozen)});
    expect_named(ranks, frozen,
                 "rank " + std::to_string(frozen) + " has been stopped by a signal for", 25);
  }
}

TEST(CommFault, LateRankIsNamedAtTheTimeout) {
  const auto ranks = spawn(3, "CommReducesWithinThreeSeconds",
                           {.kind = FaultKind::late, .rank = 1, .delay = milliseconds(8'000)});
  expect_named(ranks, 1,
               "all_reduce \"bucket 3\": timed out after 3.0 s: rank 1 has not entered it", 25);
  EXPECT_GE(ranks[0].seconds_after_fault, 2.9);
}

TEST(CommFault, LateRankIsWaitedFor) {
  const auto ranks = spawn(2, "CommReducesWithinThreeSeconds",
                           {.kind = FaultKind::late, .rank = 1, .delay = milliseconds(1'500)});
  for (const RankReport& report : ranks) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.end.code, 0);
  }
}

HASTEN_RANK_FUNCTION(CommAbandonsWhatFails) {
  const auto comm = comm_of(rank, milliseconds(60'000));
  try {
    rank.fault_here();
    sum_once(*comm);
  } catch (const std::exception& error) {
    comm->abort(error);
    throw;
  }
}

TEST(CommFault, AFailingRanksReasonReachesItsPeers) {
  for (int faulty = 0; faulty < 2; ++faulty) {
    expect_named(
        spawn(2, "CommAbandonsWhatFails", {.kind = FaultKind::fail, .rank = faulty}),
        static_cast<size_t>(faulty),
        "all_reduce \"bucket 3\": rank " + std::to_string(faulty) + " failed: planted failure", 3);
  }
}

HASTEN_RANK_FUNCTION(CommThrowsWithAHandleInFlight) {
  // Otherwise the faulty rank would wait for the others inside the call that returns the handle.
  // Over shared memory the others would find out that it is in another operation.
  const auto comm =
      comm_of(rank, milliseconds(60'000), ShapeCheck::never, milliseconds(5'000), "gloo");
  torch::Tensor tensor = torch::ones({1'000'000});
  if (rank.is_faulty()) {
    Work handle = comm->all_reduce_async(tensor, ReduceOp::SUM, "bucket 3");
    rank.fault_here();
  }
  // The others never enter it, so the faulty rank's operation does not complete.
  comm->all_gather_object(1, "elsewhere");
}

TEST(CommFault, AnExceptionWithAHandleInFlightEndsTheRankAtOnce) {
  const auto ranks =
      spawn(2, "CommThrowsWithAHandleInFlight", {.kind = FaultKind::fail, .rank = 1});
  EXPECT_EQ(ranks[1].error, "planted failure");
  EXPECT_FALSE(ranks[1].timed_out);
  EXPECT_EQ(ranks[1].end.signal, 0);
  expect_named(ranks, 1, "rank 1 died", 5);
}

HASTEN_RANK_FUNCTION(CommEntersDifferentOperations) {
  const auto comm = comm_of(rank, milliseconds(20'000));
  const auto start = std::chrono::steady_clock::now();
  try {
    if (rank.world().rank == 0) {
      sum_once(*comm);
    } else {
      comm->all_gather_object(1, "shapes");
    }
  } catch (const CommunicationError&) {
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10'000));
    throw;
  }
}

TEST(CommFault, DifferentOperationsAreNamedLongBeforeTheTimeout) {
  const auto ranks = spawn(2, "CommEntersDifferentOperations");
  for (const RankReport& report : ranks) {
    for (const char* part :
         {"rank 0 has all_reduce \"bucket 3\"", "rank 1 has all_gather_object \"shapes\""}) {
      EXPECT_NE(report.error.find(part), std::string::npos) << report.error;
    }
  }
}

HASTEN_RANK_FUNCTION(CommIsInterrupted) {
  install_interrupt_handlers();
  const auto comm = comm_of(rank, milliseconds(60'000));
  if (rank.world().rank != 0) {
    std::this_thread::sleep_for(milliseconds(1'000));
    return;
  }
  std::thread([] {
    std::this_thread::sleep_for(milliseconds(200));
    std::raise(SIGINT);
  }).detach();
  const auto start = std::chrono::steady_clock::now();
  try {
    sum_once(*comm);
  } catch (const Interrupted& interrupted) {
    const auto waited = std::chrono::steady_clock::now() - start;
    rank.report("signal", interrupted.signal());
    rank.report("quick", waited < milliseconds(500));
  }
  comm->close();
}

TEST(CommFault, AnInterruptEndsAWait) {
  const auto ranks = spawn(2, "CommIsInterrupted");
  EXPECT_EQ(ranks[0].values.value("signal", 0), SIGINT);
  EXPECT_EQ(ranks[0].values.value("quick", false), true);
  EXPECT_EQ(ranks[0].end.code, 0);
}

} // namespace hasten
