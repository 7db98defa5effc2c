// Cases that must make the harness fail. Between them are cases that must still pass.
// world_failures_test.cpp runs them with a short limit for each case.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "support/world.h"

namespace hasten {

using testing_support::test_world;

static bool on_rank_one() { return test_world().rank == 1; }

// A collective that does nothing: each rank keeps what it had.
static void no_op_all_reduce(at::Tensor&) {}

TEST(Planted, Passes) { EXPECT_TRUE(testing_support::test_store() != nullptr); }

TEST(Planted, NoOpCollective) {
  auto tensor = at::full({2}, test_world().rank + 1.0);
  no_op_all_reduce(tensor);
  const int n = test_world().world_size;
  EXPECT_TRUE(at::equal(tensor, at::full({2}, n * (n + 1) / 2.0)));
}

TEST(Planted, PassesAfterAFailure) { EXPECT_GE(test_world().world_size, 2); }

TEST(Planted, FailsAlone) { EXPECT_FALSE(on_rank_one()) << "only here"; }

TEST(Planted, FailsWhileTheOtherWaits) {
  if (on_rank_one()) {
    FAIL() << "gave up";
  }
  testing_support::test_store()->get("never set");
}

TEST(Planted, ThrowsAlone) {
  if (on_rank_one()) {
    throw std::runtime_error("thrown here");
  }
}

TEST(Planted, Hangs) {
  while (on_rank_one()) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

TEST(Planted, IsKilled) {
  if (on_rank_one()) {
    std::raise(SIGKILL);
  }
}

TEST(Planted, IsStopped) {
  if (on_rank_one()) {
    std::raise(SIGSTOP);
  }
}

TEST(Planted, LeavesQuietly) {
  if (on_rank_one()) {
    ::_exit(0);
  }
}

TEST(Planted, SkipsAlone) {
  if (on_rank_one()) {
    GTEST_SKIP() << "not here";
  }
}

TEST(Planted, FailsAtItsEnd) {
  testing_support::at_case_end([] {
    if (on_rank_one()) {
      throw std::runtime_error("left something behind");
    }
  });
}

TEST(Planted, SkipsEverywhere) { GTEST_SKIP() << "needs more than there is"; }

TEST(Planted, PassesAtLast) { EXPECT_GE(test_world().world_size, 2); }

class RegisteredLate : public testing::Test {
  void TestBody() override {}
};

// A rank that has another number of cases than the others.
[[maybe_unused]] static const bool planted_extra_case = [] {
  const char* rank = std::getenv("RANK");
  const char* wanted = std::getenv("HASTEN_PLANT_EXTRA_CASE");
  if (rank != nullptr && wanted != nullptr && std::string(rank) == wanted) {
    testing::RegisterTest("Planted", "OnlyHere", nullptr, nullptr, __FILE__, __LINE__,
                          []() -> RegisteredLate* { return new RegisteredLate; });
  }
  return true;
}();

} // namespace hasten
