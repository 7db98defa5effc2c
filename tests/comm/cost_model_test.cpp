// The cost model of a real group.
#include "hasten/comm/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "support/communicator.h"

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

} // namespace hasten
