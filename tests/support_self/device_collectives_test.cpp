// Collectives on tensors of the test device.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "hasten/comm/communicator.h"
#include "support/device_backend.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten {

using testing::IsSubstring;
using testing_support::device_group_calls;
using testing_support::device_world;
using testing_support::RankReport;
using testing_support::take_device_errors;
using testing_support::test_device;

static std::string first_error() {
  const auto errors = take_device_errors();
  return errors.empty() ? "" : errors[0];
}

static std::vector<RankReport> spawn_two(const std::string& function) {
  return testing_support::spawn(2, function, {}, {.deadline = std::chrono::seconds(200)});
}

static void run_on_two(const std::string& function) {
  for (const RankReport& rank : spawn_two(function)) {
    EXPECT_EQ(rank.error, "");
    EXPECT_EQ(rank.end.code, 0);
  }
}

TEST(DeviceCollectives, OneRankKeepsItsValues) {
  const auto communicator = device_world(World{});
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

HASTEN_RANK_FUNCTION(ForgetAWait) {
  const auto communicator = device_world(rank.world(), 0);
  const at::Tensor x = at::ones({4}, test_device());
  Work work = communicator->all_reduce_async(x, ReduceOp::SUM, "gradients");
  x.mul(2);
  EXPECT_PRED_FORMAT2(IsSubstring,
                      "aten::mul.out reads on stream 0 of device 0 memory that all_reduce writes",
                      first_error());
  work.wait();
  EXPECT_PRED_FORMAT2(IsSubstring, "that aten::mul.out reads on stream 0", first_error());
  x.mul(2);
  EXPECT_EQ(first_error(), "");
  communicator->close();
}

TEST(DeviceCollectives, AForgottenWaitIsReported) { run_on_two("ForgetAWait"); }

// What an exception leaves: nobody waits, and the tensors are freed or written next.
HASTEN_RANK_FUNCTION(LoseHandles) {
  const auto communicator = device_world(rank.world(), 0);
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
  EXPECT_PRED_FORMAT2(IsSubstring, "memory that all_reduce writes", first_error());
  communicator->close();
}

TEST(DeviceCollectives, AHandleThatGoesWithoutAWaitOrdersTheStreamOnWhichItStarted) {
  run_on_two("LoseHandles");
}

HASTEN_RANK_FUNCTION(StartNothing) {
  const auto communicator = device_world(rank.world(), 0);
  const at::Tensor x = at::ones({4}, test_device());
  EXPECT_ANY_THROW(communicator->all_gather_async(at::zeros({2, 5}, test_device()), x, "gather"));
  EXPECT_ANY_THROW(communicator->all_reduce(at::ones({4}, test_device(1)), ReduceOp::SUM, "other"));
  communicator->close();
}

TEST(DeviceCollectives, AnOperationThatDoesNotStartLeavesNothing) { run_on_two("StartNothing"); }

HASTEN_RANK_FUNCTION(ReduceOnTheTestDevice) {
  const auto communicator = device_world(rank.world(), 0);
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

TEST(DeviceCollectives, TwoRanksExchangeTheirValues) { run_on_two("ReduceOnTheTestDevice"); }

// Three operations, one group call; those that are none of the back end go one by one.
HASTEN_RANK_FUNCTION(StartTogether) {
  const auto communicator = device_world(rank.world(), 0);
  const auto mine = static_cast<float>(rank.world().rank + 1);
  const at::Tensor x = at::full({4}, mine, test_device());
  const at::Tensor y = at::full({2}, mine, test_device());
  const at::Tensor all = at::zeros({2, 4}, test_device());
  const at::Tensor own = at::full({4}, mine, test_device());
  const at::Tensor rows = at::full({2, 3}, mine, test_device());
  const at::Tensor row = at::zeros({3}, test_device());
  using Kind = Collective::Kind;
  const int before = device_group_calls();
  communicator
      ->start_together({{Kind::all_reduce, "x", x, {}, ReduceOp::AVG},
                        {Kind::broadcast, "y", y, {}, {}, 1},
                        {Kind::all_gather, "all", all, own},
                        {Kind::reduce_scatter, "row", row, rows}})
      .wait();
  EXPECT_EQ(device_group_calls() - before, 1);
  EXPECT_EQ(x.sum().item<float>(), 6);
  EXPECT_EQ(y.sum().item<float>(), 4);
  EXPECT_EQ(all.sum().item<float>(), 12);
  EXPECT_EQ(row.sum().item<float>(), 9);

  const at::Tensor host = at::full({2}, mine);
  const at::Tensor half = rows.to(at::kHalf);
  communicator
      ->start_together(
          {{Kind::reduce_scatter, "fp32 of half", row, half}, {Kind::all_reduce, "host", host}})
      .wait();
  EXPECT_EQ(row.sum().item<float>(), 9);
  EXPECT_EQ(host.sum().item<float>(), 6);
  EXPECT_EQ(device_group_calls() - before, 1);
  EXPECT_EQ(first_error(), "");
  communicator->close();
}

TEST(DeviceCollectives, OperationsThatStartTogetherAreOneGroupCall) { run_on_two("StartTogether"); }

// 60000 + 60000 is more than half can hold.
HASTEN_RANK_FUNCTION(SumHalf) {
  CommunicatorOptions options{.sum_in_fp32 = true};
  const auto communicator = device_world(rank.world(), 0, options);
  const at::Tensor half = at::full({4}, 60000.0, at::TensorOptions(test_device()).dtype(at::kHalf));
  communicator->all_reduce(half, ReduceOp::AVG, "mean");
  EXPECT_EQ(half.to(at::kFloat).max().item<float>(), 60000.0F);
  options = {.name = "in half"};
  const auto narrow = communicator->duplicate(options);
  narrow->all_reduce(half, ReduceOp::AVG, "mean");
  EXPECT_TRUE(half.isinf().all().item<bool>());
  narrow->close();
  communicator->close();
}

TEST(DeviceCollectives, AnOptionSumsHalfInFp32) { run_on_two("SumHalf"); }

HASTEN_RANK_FUNCTION(StartInTwoOrders) {
  const auto first = device_world(rank.world(), 0, {.check_shapes = ShapeCheck::always});
  const auto second = first->duplicate({.name = "second", .check_shapes = ShapeCheck::always});
  const at::Tensor x = at::ones({4}, test_device());
  first->all_reduce(x, ReduceOp::SUM, "both");
  second->all_reduce(x, ReduceOp::SUM, "both");
  const auto reduce = [&](Communicator& group) {
    try {
      group.all_reduce(at::ones({4}, test_device()), ReduceOp::SUM, "apart");
    } catch (const std::exception& error) {
      rank.report("error", std::string(error.what()));
    }
  };
  const bool main = rank.world().rank == 0;
  std::thread early([&] { reduce(main ? *first : *second); }); // as threads that no order binds
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  reduce(main ? *second : *first);
  early.join();
}

TEST(DeviceCollectives, TheOrderOfTwoGroupsIsComparedOnDemand) {
  for (const RankReport& rank : spawn_two("StartInTwoOrders")) {
    EXPECT_PRED_FORMAT2(IsSubstring, "operations of other groups on the device",
                        rank.values.value("error", std::string()));
  }
}

HASTEN_RANK_FUNCTION(ReadBeforeTheWait) {
  const auto communicator = device_world(rank.world(), 0);
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
