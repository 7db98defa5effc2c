// Operations on a device that cannot end: nobody waits for them but the device.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "hasten/base/error.h"
#include "hasten/comm/backend.h"
#include "support/device_backend.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten::device_fault_test {

using std::chrono::milliseconds;
using testing_support::device_world;
using testing_support::FaultKind;
using testing_support::FaultRank;
using testing_support::RankReport;
using testing_support::spawn;
using testing_support::test_device;

static void reduce_with(FaultRank& rank, milliseconds timeout, bool short_beats = false) {
  CommunicatorOptions options{.timeout = timeout};
  if (short_beats) {
    options.heartbeat_timeout = milliseconds(1000);
  }
  const auto comm = device_world(rank.world(), 0, options);
  const at::Tensor x = at::ones({1000}, test_device());
  comm->all_reduce(x, ReduceOp::SUM, "bucket");
  EXPECT_EQ(x[0].item<int>(), 2);
  rank.fault_here();
  // Not new, so the ranks do not compare it first, which would find the lost one on the host.
  Work work = comm->all_reduce_async(x, ReduceOp::SUM, "bucket");
  std::string first;
  try {
    work.wait(); // the host waits here for the device
  } catch (const CommunicationError& error) {
    first = error.what();
  }
  work = {};
  EXPECT_TRUE(x.isnan().all().item<bool>()) << "undefined";
  try { // before the host believes such a value
    comm->check("value");
    ADD_FAILURE() << "no error";
  } catch (const CommunicationError& error) {
    EXPECT_EQ(std::string(error.what()), first);
  }
  try { // what is left of the group
    comm->barrier("later");
    ADD_FAILURE() << "no error";
  } catch (const CommunicationError& error) {
    EXPECT_EQ(std::string(error.what()), first);
  }
  comm->close();
  throw CommunicationError("test::reduce", first);
}

HASTEN_RANK_FUNCTION(DeviceReduces) { reduce_with(rank, milliseconds(60'000)); }
HASTEN_RANK_FUNCTION(DeviceReducesWithShortBeats) { reduce_with(rank, milliseconds(60'000), true); }
HASTEN_RANK_FUNCTION(DeviceReducesWithinTwoSeconds) { reduce_with(rank, milliseconds(2'000)); }

/// What the other rank throws, within `limit` seconds of the fault.
static void expect_said(const RankReport& other, const std::string& text, double limit) {
  EXPECT_FALSE(other.timed_out);
  EXPECT_EQ(other.end.signal, 0);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, text, other.error);
  EXPECT_LT(other.seconds_after_fault, limit);
}

TEST(DeviceFault, AKilledRankIsNamedAndTheHostComesFree) {
  for (const int killed : {0, 1}) {
    const auto ranks = spawn(2, "DeviceReduces", {.kind = FaultKind::kill, .rank = killed});
    expect_said(ranks[static_cast<size_t>(1 - killed)],
                "all_reduce \"bucket\": rank " + std::to_string(killed) + " died", 5);
  }
}

TEST(DeviceFault, AFrozenRankIsNamedWithinTheHeartbeatLimit) {
  for (const int frozen : {0, 1}) {
    const auto ranks =
        spawn(2, "DeviceReducesWithShortBeats", {.kind = FaultKind::freeze, .rank = frozen});
    expect_said(ranks[static_cast<size_t>(1 - frozen)],
                "rank " + std::to_string(frozen) + " has been stopped by a signal for", 25);
  }
}

TEST(DeviceFault, ARankThatNeverComesIsNamedAtTheTimeout) {
  const auto ranks = spawn(2, "DeviceReducesWithinTwoSeconds",
                           {.kind = FaultKind::late, .rank = 1, .delay = milliseconds(4'000)});
  expect_said(ranks[0], "all_reduce \"bucket\": timed out after 2.0 s: rank 1", 3.8);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "timed out after 2.0 s: rank 1", ranks[1].error);
}

/// The thread that watches holds this back end when its group goes, and then waits in its
/// destructor, as in that of a Gloo group whose peers are slow.
struct SlowEnd final : c10d::Backend {
  using c10d::Backend::Backend;
  c10d::ErrorType getError() override {
    looks = true;
    while (!gone) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return c10d::ErrorType::SUCCESS;
  }
  ~SlowEnd() override { std::this_thread::sleep_for(milliseconds(6000)); }

  static inline std::atomic<bool> looks{false};
  static inline std::atomic<bool> gone{false};
};

HASTEN_RANK_FUNCTION(DeviceReducesAfterASlowEnd) {
  register_device_backend("slow end", test_device().type(), [](const auto& context) {
    return c10::make_intrusive<SlowEnd>(context.rank, context.world_size);
  });
  const auto slow =
      Communicator::create(rank.world(), {.device = test_device(), .backend = "slow end"});
  while (!SlowEnd::looks) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  slow->close();
  SlowEnd::gone = true;
  const auto comm = device_world(rank.world(), 0, {});
  const at::Tensor x = at::ones({1000}, test_device());
  comm->all_reduce(x, ReduceOp::SUM, "bucket");
  rank.fault_here();
  comm->all_reduce(x, ReduceOp::SUM, "bucket");
}

TEST(DeviceFault, TheSlowEndOfAGroupDoesNotKeepTheNextFromAPeersFailure) {
  const auto ranks = spawn(2, "DeviceReducesAfterASlowEnd", {.kind = FaultKind::kill, .rank = 1});
  expect_said(ranks[0], "all_reduce \"bucket\": rank 1 died", 4);
}

HASTEN_RANK_FUNCTION(DeviceShrinks) {
  const auto comm = device_world(rank.world(), 0, {.heartbeat_timeout = milliseconds(1000)});
  const at::Tensor x = at::ones({10}, test_device());
  comm->all_reduce(x, ReduceOp::SUM, "before");
  rank.fault_here();
  EXPECT_THROW(comm->all_reduce(x, ReduceOp::SUM, "before"), CommunicationError);
  const auto left = comm->shrink();
  ASSERT_TRUE(left);
  EXPECT_EQ(left->ranks, (std::vector<int>{0, 2}));
  const at::Tensor y = at::full({10}, rank.world().rank, test_device());
  comm->all_reduce(y, ReduceOp::SUM, "after");
  EXPECT_EQ(y[0].item<int>(), 2);
  comm->close();
}

TEST(DeviceFault, TheRemainingRanksContinueOnTheirDevices) {
  const auto ranks = spawn(3, "DeviceShrinks", {.kind = FaultKind::kill, .rank = 1});
  for (const size_t rank : {0, 2}) {
    EXPECT_EQ(ranks[rank].error, "");
    EXPECT_EQ(ranks[rank].end.code, 0);
  }
}

} // namespace hasten::device_fault_test
