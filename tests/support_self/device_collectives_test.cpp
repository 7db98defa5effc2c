// Collectives on tensors of the test device.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "hasten/comm/communicator.h"
#include "support/device_communicator.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten {

using testing::IsSubstring;
using testing_support::device_communicator;
using testing_support::RankReport;
using testing_support::take_device_errors;
using testing_support::test_device;

static std::string first_error() {
  const auto errors = take_device_errors();
  return errors.empty() ? "" : errors[0];
}

static std::shared_ptr<Communicator> one_rank() {
  return device_communicator(Communicator::create(World{}, {}));
}

TEST(DeviceCollectives, OneRankKeepsItsValues) {
  const auto communicator = one_rank();
  const at::Tensor x = at::ones({2, 3}, test_device());
  communicator->all_reduce(x, ReduceOp::AVG, "mean");
  EXPECT_EQ(x.sum().item<float>(), 6);
  const at::Tensor all = at::zeros({1, 2, 3}, test_device());
  communicator->all_gather_async(all, x, "gather").wait();
  EXPECT_TRUE(all.cpu().equal(at::ones({1, 2, 3})));
  EXPECT_TRUE(communicator->all_gather_rows(x, "rows").cpu().equal(at::ones({2, 3})));
  const at::Tensor host = at::ones({2});
  communicator->broadcast(host, 0, "host");
  EXPECT_EQ(host.sum().item<float>(), 2);
  communicator->close();
}

TEST(DeviceCollectives, AForgottenWaitIsReported) {
  const auto communicator = one_rank();
  const at::Tensor x = at::ones({4}, test_device());
  Work work = communicator->all_reduce_async(x, ReduceOp::SUM, "gradients");
  x.mul(2);
  EXPECT_PRED_FORMAT2(IsSubstring,
                      "aten::mul.out reads on stream 0 of device 0 memory that all_reduce "
                      "\"gradients\" writes",
                      first_error());
  work.wait();
  EXPECT_PRED_FORMAT2(IsSubstring, "that aten::mul.out reads on stream 0", first_error());
  x.mul(2);
  EXPECT_EQ(first_error(), "");
  communicator->close();
}

// What an exception leaves: nobody waits, and the tensors are freed or written next.
TEST(DeviceCollectives, AHandleThatGoesWithoutAWaitOrdersTheStreamOnWhichItStarted) {
  const auto communicator = one_rank();
  const at::Tensor x = at::ones({4}, test_device());
  Work work = communicator->all_reduce_async(at::ones({4}, test_device()), ReduceOp::SUM, "freed");
  Work kept = communicator->all_reduce_async(x, ReduceOp::SUM, "kept");
  std::thread([gone = std::move(work), too = std::move(kept)] {}).join();
  EXPECT_EQ(first_error(), "");
  EXPECT_TRUE(x.isnan().all().item<bool>()) << "nobody may use the result";
  x.zero_();
  EXPECT_EQ(first_error(), "");
  communicator->all_reduce_async(x, ReduceOp::SUM, "gradients");
  const c10::Stream other =
      c10::impl::VirtualGuardImpl(x.device().type()).getStreamFromGlobalPool(x.device());
  {
    const c10::StreamGuard guard(other);
    x.mul(2);
  }
  other.synchronize(); // before x is freed
  EXPECT_PRED_FORMAT2(IsSubstring, "memory that all_reduce \"gradients\" writes", first_error());
  communicator->close();
}

TEST(DeviceCollectives, AnOperationThatDoesNotStartLeavesNothing) {
  const auto communicator = one_rank();
  const at::Tensor x = at::ones({4}, test_device());
  EXPECT_ANY_THROW(communicator->all_gather_async(at::zeros({1, 5}, test_device()), x, "gather"));
  communicator->close();
}

static std::vector<RankReport> spawn_two(const std::string& function) {
  return testing_support::spawn(2, function, {}, {.deadline = std::chrono::seconds(200)});
}

HASTEN_RANK_FUNCTION(ReduceOnTheTestDevice) {
  const auto communicator = device_communicator(Communicator::create(rank.world(), {}));
  const auto mine = static_cast<float>(rank.world().rank + 1);
  const at::Tensor x = at::full({4}, mine, test_device());
  communicator->all_reduce(x, ReduceOp::SUM, "sum");
  EXPECT_EQ(x.sum().item<float>(), 12);

  const at::Tensor half = at::full({4}, mine, at::TensorOptions(test_device()).dtype(at::kHalf));
  communicator->all_reduce(half, ReduceOp::AVG, "mean");
  EXPECT_EQ(half.sum().item<float>(), 6);

  const at::Tensor y = at::full({4}, mine, test_device());
  Work reduced = communicator->reduce_async(y, 0, ReduceOp::SUM, "reduce");
  if (!communicator->is_main()) {
    y.zero_(); // allowed as soon as the call has returned
  }
  reduced.wait();
  EXPECT_EQ(y.sum().item<float>(), communicator->is_main() ? 12 : 0);

  const at::Tensor z = at::full({4}, mine, test_device());
  communicator->broadcast(z, 1, "broadcast");
  EXPECT_EQ(z.sum().item<float>(), 8);

  const at::Tensor all = at::zeros({2, 4}, test_device());
  communicator->all_gather_async(all, at::full({4}, mine, test_device()), "gather").wait();
  EXPECT_TRUE(all.select(1, 0).cpu().equal(at::tensor({1.0F, 2.0F})));

  const at::Tensor piece = at::zeros({4}, test_device());
  communicator->reduce_scatter_async(piece, all, "scatter").wait();
  EXPECT_EQ(piece.sum().item<float>(), 8 * mine);

  const at::Tensor rows = at::full({rank.world().rank + 1, 2}, mine, test_device());
  EXPECT_EQ(communicator->all_gather_rows(rows, "rows").sum().item<float>(), 10);
  EXPECT_EQ(first_error(), "");
  communicator->close();
}

TEST(DeviceCollectives, TwoRanksExchangeTheirValues) {
  for (const RankReport& rank : spawn_two("ReduceOnTheTestDevice")) {
    EXPECT_EQ(rank.error, "");
    EXPECT_EQ(rank.end.code, 0);
  }
}

HASTEN_RANK_FUNCTION(ReadBeforeTheWait) {
  const auto communicator = device_communicator(Communicator::create(rank.world(), {}));
  const at::Tensor x = at::ones({4}, test_device());
  Work work = communicator->all_reduce_async(x, ReduceOp::SUM, "gradients");
  x.mul(2);
  rank.report("errors", take_device_errors());
  work.wait();
  communicator->close();
}

TEST(DeviceCollectives, EachRankReportsAForgottenWait) {
  for (const RankReport& rank : spawn_two("ReadBeforeTheWait")) {
    EXPECT_FALSE(rank.values.value("errors", std::vector<std::string>{}).empty());
  }
}

} // namespace hasten
