// Worlds that continue with the remaining ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/store_server.h"
#include "hasten/comm/communicator.h"
#include "support/spawn.h"
#include "support/temporary_folder.h"

namespace hasten {

using std::chrono::milliseconds;
using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::spawn;

static std::shared_ptr<Communicator> shrinking_world(const FaultRank& rank, milliseconds timeout) {
  auto comm = Communicator::create(rank.world(), {.timeout = timeout});
  comm->barrier("meet");
  return comm;
}

/// Repeats all_reduce until it fails.
static void use_until_it_fails(Communicator& comm) {
  for (;;) {
    comm.all_reduce(torch::ones({50'000}), ReduceOp::SUM, "bucket");
  }
}

/// Every kind of operation, among exactly `launched` (their ranks at the start).
static void expect_world_of(Communicator& comm, int own, const std::vector<int>& launched) {
  const auto size = static_cast<int>(launched.size());
  ASSERT_EQ(comm.world_size(), size);
  EXPECT_EQ(launched[static_cast<size_t>(comm.rank())], own);
  std::vector<int> said;
  for (const auto& value : comm.all_gather_object(own, "names")) {
    said.push_back(value);
  }
  EXPECT_EQ(said, launched);
  const torch::Tensor sum = torch::full({50'000}, own + 1, torch::kFloat);
  comm.all_reduce(sum, ReduceOp::SUM, "bucket");
  float expected = 0;
  for (const int rank : launched) {
    expected += static_cast<float>(rank + 1);
  }
  EXPECT_EQ(sum.min().item<float>(), expected);
  EXPECT_EQ(sum.max().item<float>(), expected);
  const torch::Tensor row = torch::full({3}, own, torch::kLong);
  const torch::Tensor rows = torch::empty({size, 3}, torch::kLong);
  comm.all_gather_async(rows, row, "rows").wait();
  for (int i = 0; i < size; ++i) {
    EXPECT_EQ(rows[i][2].item<int>(), launched[static_cast<size_t>(i)]);
  }
  const torch::Tensor swapped = torch::empty({size, 2}, torch::kLong);
  comm.all_to_all_async(swapped, torch::full({size, 2}, own, torch::kLong), "swapped").wait();
  EXPECT_EQ(swapped.sum().item<int64_t>(), 2 * rows.select(1, 0).sum().item<int64_t>());
  comm.duplicate({.name = "another " + std::to_string(size)})->barrier("meet");
  comm.barrier("done");
}

HASTEN_RANK_FUNCTION(ShrinksOnce) {
  const auto comm = shrinking_world(rank, milliseconds(20'000));
  const auto other = comm->duplicate({.name = "other"});
  other->barrier("made"); // so that no rank dies while the group is created
  EXPECT_FALSE(comm->shrink()); // nothing has failed
  const int victim = rank.world().world_size / 2;
  try {
    rank.fault_here();
    use_until_it_fails(*comm);
  } catch (const CommunicationError&) {
  }
  const auto left = comm->shrink();
  ASSERT_TRUE(left);
  std::vector<int> expected;
  for (int i = 0; i < rank.world().world_size; ++i) {
    if (i != victim) {
      expected.push_back(i);
    }
  }
  EXPECT_EQ(left->ranks, expected);
  EXPECT_NE(left->cause.find("rank " + std::to_string(victim) + " died"), std::string::npos)
      << left->cause;
  expect_world_of(*comm, rank.world().rank, expected);
  EXPECT_THROW(other->barrier("of the old world"), CommunicationError);
  other->close();
  comm->close();
}

TEST(ShrinkFault, ThoseThatAreLeftAreAWorldOfTheirOwn) {
  for (const int world : {2, 3, 4}) {
    const auto ranks = spawn(world, "ShrinksOnce", {.kind = FaultKind::kill, .rank = world / 2});
    for (const auto& report : ranks) {
      EXPECT_FALSE(report.timed_out) << world;
      EXPECT_EQ(report.error, "") << world;
      EXPECT_LT(report.seconds_after_fault, 8);
    }
  }
}

// Rank 1 is stopped while it reduces. When the others have gone on without it, it wakes up.
HASTEN_RANK_FUNCTION(WakesWhenTheOthersHaveShrunk) {
  const auto comm = Communicator::create(
      rank.world(), {.timeout = milliseconds(20'000), .heartbeat_timeout = milliseconds(1'000)});
  const auto pids = comm->all_gather_object(static_cast<int>(getpid()), "pids");
  const int own = rank.world().rank;
  if (own == 1) {
    std::thread stopping([] {
      std::this_thread::sleep_for(milliseconds(50));
      ::kill(getpid(), SIGSTOP);
    });
    EXPECT_THROW(use_until_it_fails(*comm), CommunicationError);
    stopping.join();
    EXPECT_THROW(comm->shrink(), CommunicationError);
    return;
  }
  EXPECT_THROW(use_until_it_fails(*comm), CommunicationError);
  ASSERT_TRUE(comm->shrink());
  for (int i = 0; i < 400; ++i) {
    if (i == 20 && own == 0) {
      ::kill(pids[1].get<int>(), SIGCONT);
    }
    const torch::Tensor sum = torch::full({50'000 + 1000 * i}, own + 1.0);
    comm->all_reduce(sum, ReduceOp::SUM, "bucket");
    ASSERT_EQ(sum.min().item<float>(), 4); // ranks 0 and 2
    ASSERT_EQ(sum.max().item<float>(), 4);
  }
  comm->close();
}

TEST(ShrinkFault, ARankThatWakesUpAfterwardsChangesNothing) {
  for (const auto& report : spawn(3, "WakesWhenTheOthersHaveShrunk")) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.end.code, 0);
    EXPECT_FALSE(report.timed_out);
  }
}

// Rank 3 dies, then rank 1 when it should meet the others, and rank 2 later.
HASTEN_RANK_FUNCTION(ShrinksThreeTimes) {
  const int own = rank.world().rank;
  const auto comm = shrinking_world(rank, milliseconds(20'000));
  try {
    rank.fault_here();
    use_until_it_fails(*comm);
  } catch (const CommunicationError&) {
  }
  if (own == 1) {
    std::raise(SIGKILL);
  }
  EXPECT_EQ(comm->shrink()->ranks, (std::vector<int>{0, 2}));
  expect_world_of(*comm, own, {0, 2});
  try {
    if (own == 2) {
      std::raise(SIGKILL);
    }
    use_until_it_fails(*comm);
  } catch (const CommunicationError& error) { // the message names the rank's number at the start
    EXPECT_NE(std::string(error.what()).find("rank 2 died"), std::string::npos) << error.what();
  }
  EXPECT_EQ(comm->shrink()->ranks, (std::vector<int>{0}));
  expect_world_of(*comm, own, {0});
  comm->close();
  rank.report("ended", true);
}

TEST(ShrinkFault, DeathsInARowLeaveOneRank) {
  const auto ranks = spawn(4, "ShrinksThreeTimes", {.kind = FaultKind::kill, .rank = 3});
  EXPECT_EQ(ranks[0].error, "");
  EXPECT_TRUE(ranks[0].values.value("ended", false));
}

// Rank 3 acts as the launcher, which serves the store for the others.
HASTEN_RANK_FUNCTION(ShrinksOnALaunchersStore) {
  const int own = rank.world().rank;
  const std::filesystem::path file = std::getenv("PORT_FILE");
  if (own == 3) {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.port = 0;
    options.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    write_file_atomically(file, std::to_string(store->getPort()));
    while (store->add("finished", 0) < 2) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    return;
  }
  while (!std::filesystem::exists(file)) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  World world = rank.world();
  world.world_size = world.local_world_size = 3;
  world.master_addr = "127.0.0.1";
  world.master_port = std::stoi(read_file(file));
  world.agent_store = true;
  const auto comm = Communicator::create(world, {.timeout = milliseconds(20'000)});
  comm->barrier("meet");
  try {
    rank.fault_here();
    use_until_it_fails(*comm);
  } catch (const CommunicationError&) {
  }
  EXPECT_EQ(comm->shrink()->ranks, (std::vector<int>{1, 2}));
  expect_world_of(*comm, own, {1, 2});
  comm->close();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(world.master_port);
  options.waitWorkers = false;
  c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)->add("finished", 1);
}

TEST(ShrinkFault, WithALaunchersStoreRankZeroMayDie) {
  const testing_support::TemporaryFolder scratch;
  const auto ranks = spawn(4, "ShrinksOnALaunchersStore", {.kind = FaultKind::kill, .rank = 0},
                           {.environment = {{"PORT_FILE", (scratch / "port").string()}}});
  for (const size_t i : {size_t{1}, size_t{2}, size_t{3}}) {
    EXPECT_EQ(ranks[i].error, "");
    EXPECT_FALSE(ranks[i].timed_out);
  }
}

HASTEN_RANK_FUNCTION(ShrinksBehindRankZero) {
  const auto comm = shrinking_world(rank, milliseconds(20'000));
  try {
    rank.fault_here();
    use_until_it_fails(*comm);
  } catch (const CommunicationError&) {
  }
  EXPECT_EQ(comm->shrink()->ranks, (std::vector<int>{1, 2}));
  expect_world_of(*comm, rank.world().rank, {1, 2});
  comm->close();
}

// This test acts as hasten launch.
TEST(ShrinkFault, TheStoreOfHastenLaunchOutlivesRankZero) {
  const detail::StoreServer server(
      {.socket = detail::unique_socket_name(detail::launcher_socket_start(29'999))});
  const auto ranks = spawn(3, "ShrinksBehindRankZero", {.kind = FaultKind::kill, .rank = 0},
                           {.environment = {{"MASTER_PORT", "29999"},
                                            {"HASTEN_STORE_SOCKET", server.address().socket}}});
  for (const size_t i : {size_t{1}, size_t{2}}) {
    EXPECT_EQ(ranks[i].error, "");
    EXPECT_FALSE(ranks[i].timed_out);
  }
}

HASTEN_RANK_FUNCTION(ShrinksAndEnds) {
  const auto comm = shrinking_world(rank, milliseconds(20'000));
  try {
    rank.fault_here();
    use_until_it_fails(*comm);
  } catch (const CommunicationError&) {
    comm->shrink();
  } catch (const std::exception& error) {
    comm->abort(error);
    std::this_thread::sleep_for(milliseconds(1'000)); // is alive, but counts as lost
    return;
  }
  rank.report("size", comm->world_size());
  comm->close();
}

TEST(ShrinkFault, WithoutRankZeroNobodyGoesOn) {
  const auto ranks = spawn(3, "ShrinksAndEnds", {.kind = FaultKind::kill, .rank = 0});
  for (const size_t i : {size_t{1}, size_t{2}}) {
    EXPECT_NE(ranks[i].error.find("rank 0 died"), std::string::npos) << ranks[i].error;
    EXPECT_NE(ranks[i].error.find("cannot continue without"), std::string::npos) << ranks[i].error;
    EXPECT_LT(ranks[i].seconds_after_fault, 5);
  }
}

TEST(ShrinkFault, ARankThatSaysItFailsIsNotWaitedFor) {
  const auto ranks = spawn(3, "ShrinksAndEnds", {.kind = FaultKind::fail, .rank = 1});
  for (const size_t i : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(ranks[i].values.value("size", 0), 2) << ranks[i].error;
  }
}

// Rank 1 sleeps. With a timeout of 1.5 s the others time out after 1.5 s and continue without it
// after 3 s.
HASTEN_RANK_FUNCTION(ShrinksWithALateRank) {
  const auto comm = shrinking_world(rank, milliseconds(1'500));
  std::string first;
  try {
    rank.fault_here();
    use_until_it_fails(*comm);
  } catch (const CommunicationError& error) {
    first = error.what();
  }
  const auto left = comm->shrink();
  rank.report("shrunk", left.has_value());
  EXPECT_NE(first.find("timed out"), std::string::npos) << first;
  if (rank.world().rank == 0 && left) {
    std::this_thread::sleep_for(milliseconds(2'000)); // the store remains
  }
  comm->close();
}

TEST(ShrinkFault, NobodyIsLostWhereALateRankComes) {
  const auto ranks = spawn(3, "ShrinksWithALateRank",
                           {.kind = FaultKind::late, .rank = 1, .delay = milliseconds(2'200)});
  for (const auto& report : ranks) {
    EXPECT_EQ(report.error, "");
    EXPECT_FALSE(report.values.value("shrunk", true));
  }
}

TEST(ShrinkFault, ARankThatComesTooLateLearnsThatItWasLeftBehind) {
  const auto ranks = spawn(3, "ShrinksWithALateRank",
                           {.kind = FaultKind::late, .rank = 1, .delay = milliseconds(4'000)});
  EXPECT_TRUE(ranks[0].values.value("shrunk", false)) << ranks[0].error;
  EXPECT_TRUE(ranks[2].values.value("shrunk", false)) << ranks[2].error;
  EXPECT_NE(ranks[1].error.find("continue without rank 1"), std::string::npos) << ranks[1].error;
}

} // namespace hasten
