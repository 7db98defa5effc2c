#include "support/spawn.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <stdexcept>
#include <thread>

#include "hasten/base/error.h"

namespace hasten {

using testing_support::Fault;
using testing_support::FaultKind;
using testing_support::spawn;

HASTEN_RANK_FUNCTION(SpawnSelfSaysItsRank) {
  rank.report("rank", rank.world().rank);
  rank.fault_here();
  rank.report("after", true);
}

HASTEN_RANK_FUNCTION(SpawnSelfWaits) {
  rank.fault_here();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

HASTEN_RANK_FUNCTION(SpawnSelfNeverEnds) {
  while (rank.world().rank == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

HASTEN_RANK_FUNCTION(SpawnSelfThrowsAnInputError) {
  throw InputError("here::there", "x=" + std::to_string(rank.world().rank));
}

TEST(Spawn, RanksReturnTheirValues) {
  const auto ranks = spawn(2, "SpawnSelfSaysItsRank");
  ASSERT_EQ(ranks.size(), 2u);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& report = ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(report.end.code, 0);
    EXPECT_EQ(report.values.at("rank"), rank);
    EXPECT_EQ(report.values.at("after"), true);
    EXPECT_LT(report.seconds_after_fault, 0);
  }
}

TEST(Spawn, KilledRankEndsBySignalAndOthersGoOn) {
  const auto ranks = spawn(2, "SpawnSelfSaysItsRank", {.kind = FaultKind::kill, .rank = 1});
  EXPECT_EQ(ranks[0].end.code, 0);
  EXPECT_EQ(ranks[1].end.signal, SIGKILL);
  EXPECT_FALSE(ranks[1].timed_out);
  EXPECT_FALSE(ranks[1].values.contains("after"));
}

TEST(Spawn, FrozenRankIsKilledOnceTheOthersHaveEnded) {
  const auto ranks = spawn(2, "SpawnSelfWaits", {.kind = FaultKind::freeze, .rank = 0});
  EXPECT_EQ(ranks[0].end.signal, SIGKILL);
  EXPECT_FALSE(ranks[0].timed_out);
  EXPECT_EQ(ranks[1].end.code, 0);
}

TEST(Spawn, LateRankIsLateByTheDelay) {
  const auto ranks = spawn(1, "SpawnSelfSaysItsRank",
                           {.kind = FaultKind::late, .delay = std::chrono::milliseconds(200)});
  EXPECT_GE(ranks[0].seconds_after_fault, 0.2);
  EXPECT_EQ(ranks[0].values.at("after"), true);
}

TEST(Spawn, ExceptionsArriveWithTypeAndText) {
  const auto planted = spawn(2, "SpawnSelfSaysItsRank", {.kind = FaultKind::fail, .rank = 1});
  EXPECT_EQ(planted[0].error, "");
  EXPECT_EQ(planted[1].error, "planted failure");
  EXPECT_EQ(planted[1].end.code, 1);
  const auto thrown = spawn(2, "SpawnSelfThrowsAnInputError");
  EXPECT_EQ(thrown[1].error, "rank 1/2 [here::there] x=1.");
  EXPECT_EQ(thrown[1].error_type, "hasten::InputError");
}

TEST(Spawn, RankThatNeverEndsIsKilledAtTheDeadline) {
  const auto ranks = spawn(2, "SpawnSelfNeverEnds", {}, {.deadline = std::chrono::seconds(3)});
  EXPECT_FALSE(ranks[0].timed_out);
  EXPECT_TRUE(ranks[1].timed_out);
  EXPECT_EQ(ranks[1].end.signal, SIGKILL);
}

TEST(Spawn, UnknownFunctionsAndRanksAreRefused) {
  EXPECT_THROW(spawn(2, "NoSuchFunction"), InputError);
  EXPECT_THROW(spawn(2, "SpawnSelfWaits", {.kind = FaultKind::kill, .rank = 2}), InputError);
}

} // namespace hasten
