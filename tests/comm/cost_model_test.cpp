// The cost model of a real group, and the recorder around one.
#include "hasten/comm/cost_model.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "hasten/comm/step_prediction.h"
#include "support/communicator.h"

namespace hasten {

using testing_support::fresh_communicator;

TEST(CostModel, IsEqualOnAllRanksAndGrowsWithTheSize) {
  const auto group = fresh_communicator();
  const CostModel model = measure_cost_model(*group);
  nlohmann::json numbers{model.barrier_seconds, model.stretch, model.stolen};
  for (const OperationCost& operation : model.operations) {
    for (const OperationCost::Point& point : operation.points) {
      numbers.push_back(point.seconds);
    }
  }
  EXPECT_EQ(group->all_gather_object(numbers, "models"),
            std::vector<nlohmann::json>(static_cast<size_t>(group->world_size()), numbers));
  if (group->world_size() == 1) {
    EXPECT_TRUE(model.operations.empty());
    return;
  }
  EXPECT_EQ(model.world_size, group->world_size());
  EXPECT_EQ(model.backend, group->options().backend);
  ASSERT_EQ(model.operations.size(), 4u);
  EXPECT_GT(model.barrier_seconds, 0);
  EXPECT_GE(model.stretch, 1);
  EXPECT_GE(model.stolen, 0);
  for (const OperationCost& operation : model.operations) {
    ASSERT_GE(operation.points.size(), 1u);
    for (const OperationCost::Point& point : operation.points) {
      EXPECT_GT(point.seconds, 0);
      EXPECT_LT(point.seconds, 10);
    }
    EXPECT_TRUE(std::ranges::is_sorted(operation.points, {}, &OperationCost::Point::bytes));
    EXPECT_GT(operation.alpha + operation.beta, 0);
    EXPECT_GT(model.seconds(operation.kind, 64 << 20), 0);
  }
}

TEST(StepRecorder, LeavesOutTheTimeOfTheTransfers) {
  const auto group = fresh_communicator();
  const int64_t world = group->world_size();
  StepRecorder recorder(group);
  const auto second = recorder.duplicate({.name = "second of the recorder"});
  const at::Tensor large = torch::ones({1 << 16});
  const at::Tensor small = torch::ones({4});
  Work work;
  const std::vector<StepTrace> traces = recorder.record([&] {
    work = recorder.all_reduce_async(large, ReduceOp::SUM, "large");
    EXPECT_TRUE(work.done());
    EXPECT_EQ(large.sum().item<int64_t>(), large.numel() * world);
    if (group->is_main()) { // the others wait for it
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    second->all_reduce(small, ReduceOp::SUM, "small");
    work.wait();
  });
  EXPECT_EQ(small[0].item<int64_t>(), world);
  EXPECT_GE(traces[0].seconds, 0.5);
  if (world > 1) {
    EXPECT_LT(traces[1].seconds, 0.4);
  }
  ASSERT_EQ(traces.size(), static_cast<size_t>(world));
  const StepTrace& trace = traces[static_cast<size_t>(group->rank())];
  ASSERT_EQ(trace.operations.size(), 2u);
  EXPECT_EQ(trace.operations[0].bytes, 4 * large.numel());
  EXPECT_EQ(trace.operations[1].bytes, 16);
  EXPECT_NE(trace.operations[0].queue, trace.operations[1].queue);
  ASSERT_EQ(trace.events.size(), 4u);
  EXPECT_TRUE(trace.events[1].starts);
  EXPECT_FALSE(trace.events[2].starts);
  EXPECT_EQ(trace.events[3].operation, 0u);
  EXPECT_LE(trace.events[3].seconds, trace.seconds);
  work.wait(); // later waits are not recorded
  recorder.all_reduce(large, ReduceOp::SUM, "large");
  EXPECT_TRUE(recorder.record([] {})[0].operations.empty());
  second->close();
}

} // namespace hasten
