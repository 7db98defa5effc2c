// The cost model of a real group.
#include "hasten/comm/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "hasten/base/process.h"
#include "support/communicator.h"
#include "support/on_hosts.h"
#include "support/world.h"

namespace hasten {

using testing_support::fresh_communicator;

TEST(CostModel, IsEqualOnAllRanksAndGrowsWithTheSize) {
  const auto group = fresh_communicator();
  const CostModel model = measure_cost_model(*group);
  nlohmann::json numbers{model.barrier_seconds, model.world_size};
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
  for (const OperationCost& operation : model.operations) {
    ASSERT_GE(operation.points.size(), 1u);
    for (const OperationCost::Point& point : operation.points) {
      EXPECT_GT(point.seconds, 0);
      EXPECT_LT(point.seconds, 10);
    }
    EXPECT_TRUE(std::ranges::is_sorted(operation.points, {}, &OperationCost::Point::bytes));
    EXPECT_GT(operation.alpha + operation.beta, 0);
  }
}

TEST(CostModel, RanksOnSeveralHostsAreDescribedWithTheirHosts) {
  const int world = testing_support::test_world().world_size;
  if (world == 1) {
    EXPECT_EQ(describe_hosts(*fresh_communicator()), "");
    return;
  }
  const auto group = testing_support::on_hosts(testing_support::two_hosts(world));
  const std::string text = describe_hosts(*group);
  const std::string name = host_name(); // of both
  const int second = (world + 1) / 2; // the first rank there
  const auto ranks = [&](int first, int last) {
    return name + ": " + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
  };
  EXPECT_TRUE(text.starts_with(std::to_string(world) + " ranks on 2 hosts (" +
                               ranks(0, second - 1) + ", " + ranks(second, world - 1) + "): "))
      << text;
}

} // namespace hasten
