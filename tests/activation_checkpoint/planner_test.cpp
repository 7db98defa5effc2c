// Plans are optimal for small chains, stay within the budget in a run, and are correct when nested.
// An impossible budget is an error.
#include <nlohmann/json.hpp>
#include <random>

#include "activation_checkpoint/block_rig.h"
#include "hasten/base/error.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

TEST(PlannedRegions, AnyNestingGivesTheSameBits) {
  torch::manual_seed(4);
  const Tensor x = on_device::randn({4, 8});
  using Regions = std::vector<PlanRegion>;
  const auto ops = BlockChoice::keep_ops;
  const std::vector<std::pair<Regions, std::vector<int>>> plans{
      {{}, {1, 1, 1, 1, 1}},
      {{{0, 5}}, {2, 2, 2, 2, 2}},
      {{{0, 3}, {0, 1}, {1, 3}, {3, 5}}, {3, 2, 2, 2, 2}},
      {{{1, 4}, {1, 3}, {1, 2}}, {1, 4, 3, 2, 1}},
      {{{0, 1, ops}, {1, 5}, {2, 3, ops}, {4, 5}}, {2, 2, 3, 2, 2}}};
  const auto check = [&](auto model) {
    const Derived plain = derive_model(model, x);
    calls_of(*model);
    for (const auto& [regions, calls] : plans) {
      gradient_checkpointing_enable(model, {.plan = plan_of(*model, regions)});
      expect_same_bits(plain, derive_model(model, x));
      EXPECT_EQ(calls_of(*model), calls) << regions.size();
      expect_same_bits(plain, derive_model(model, x));
      calls_of(*model);
    }
    gradient_checkpointing_disable(model);
  };
  check(Straight(5));
  check(Chain(5)); // the model computes between its blocks
}

TEST(PlannedRegions, SeveralGraphsPartsOfAModelAndOtherModels) {
  torch::manual_seed(4);
  Straight model(4);
  const Tensor x = on_device::randn({4, 8});
  const auto run = [&] {
    return derive(model->parameters(), [&] {
      const Tensor first = model->forward(x).sum();
      // Only the first blocks, and again from the third on.
      Tensor y = call_block(model->blocks[1], call_block(model->blocks[0], x));
      y = call_block(model->blocks[2], y.sin());
      const Tensor second = model->forward(x * 2).sum();
      second.backward();
      return first + y.sum();
    });
  };
  const Derived plain = run();
  gradient_checkpointing_enable(model, {.plan = plan_of(*model, {{0, 4}, {0, 2}, {2, 3}})});
  expect_same_bits(plain, run());
  auto other = std::make_shared<ActivationPlan>();
  other->blocks = {"layer"};
  gradient_checkpointing_enable(model, {.plan = other});
  expect_says(error_of<std::exception>([&] { model->forward(x); }), {"block=block0", "profile"});
  gradient_checkpointing_disable(model);
}

// ---- The solver compared with every possible plan. ----

static ChainProfile random_chain(int blocks, std::mt19937& random, bool large_peaks = false) {
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  ChainProfile profile;
  for (int i = 0; i < blocks; ++i) {
    BlockProfile block;
    block.name = "b" + std::to_string(i);
    block.forward_seconds = draw(1, 9);
    block.backward_seconds = draw(1, 9);
    block.recompute_seconds = block.forward_seconds * draw(3, 10) / 10.0;
    block.output_bytes = draw(1, 6);
    block.saved_bytes = block.output_bytes + draw(0, 20);
    block.forward_extra = draw(0, 3);
    block.dropped_peak = block.output_bytes + draw(0, 5);
    block.backward_extra = draw(0, 6);
    block.ops_saved_bytes = block.output_bytes + draw(0, 8);
    block.ops_backward_extra = block.saved_bytes - block.output_bytes;
    block.ops_recompute_seconds = block.recompute_seconds / 2;
    if (large_peaks) {
      block.dropped_peak += draw(0, 15);
    }
    profile.blocks.push_back(block);
  }
  profile.before_bytes = draw(0, 3);
  profile.after_bytes = draw(0, 5);
  return profile;
}

// Every plan for [first, last): blocks that are kept, that keep operators, or regions with inner
// plans. The last block of a region is kept.
static std::vector<std::vector<PlanRegion>> every_plan(int64_t first, int64_t last, bool inside) {
  if (first >= last) {
    return {{}};
  }
  std::vector<std::vector<PlanRegion>> all;
  const auto join = [&](const std::vector<PlanRegion>& head, int64_t next) {
    for (const auto& rest : every_plan(next, last, inside)) {
      auto plan = head;
      plan.insert(plan.end(), rest.begin(), rest.end());
      all.push_back(std::move(plan));
    }
  };
  join({}, first + 1);
  if (!inside || first + 1 < last) {
    join({{first, first + 1, BlockChoice::keep_ops}}, first + 1);
    for (int64_t end = first + 1; end <= (inside ? last - 1 : last); ++end) {
      for (auto inner : every_plan(first, end, true)) {
        inner.insert(inner.begin(), {first, end, BlockChoice::keep});
        join(inner, end);
      }
    }
  }
  return all;
}

TEST(Planner, FindsTheBestOfAllNestedPlans) {
  std::mt19937 random(7);
  const auto plans = every_plan(0, 4, false);
  EXPECT_GT(plans.size(), 200u);
  for (int round = 0; round < 12; ++round) {
    const ChainProfile profile = random_chain(4, random, round % 2 == 1);
    const int64_t full = full_budget(profile);
    for (int64_t budget = 5; budget <= full; budget += 7) {
      double best = std::numeric_limits<double>::infinity();
      for (const auto& regions : plans) {
        const PlanCost cost = plan_cost(profile, regions);
        if (cost.peak_bytes <= budget) {
          best = std::min(best, cost.seconds);
        }
      }
      if (best == std::numeric_limits<double>::infinity()) {
        EXPECT_THROW(plan_activations(profile, budget), InputError);
        continue;
      }
      const auto plan = plan_activations(profile, budget);
      EXPECT_LE(plan->predicted_peak_bytes, budget);
      EXPECT_NEAR(plan->predicted_seconds, best, 1e-9)
          << "round " << round << ", budget " << budget;
    }
  }
}

TEST(Planner, IsMonotoneAndNamesTheLeastBudget) {
  std::mt19937 random(3);
  const ChainProfile profile = random_chain(12, random);
  const int64_t least = least_budget(profile);
  double before = std::numeric_limits<double>::infinity();
  for (int64_t budget = least; budget <= full_budget(profile); budget += 3) {
    const auto plan = plan_activations(profile, budget);
    EXPECT_LE(plan->predicted_seconds, before + 1e-9);
    before = plan->predicted_seconds;
  }
  EXPECT_NEAR(before, plan_cost(profile, keep_all_regions(12)).seconds,
              1e-9); // everything fits
  expect_says(error_of<std::exception>([&] { plan_activations(profile, least - 1); }),
              {"budget=" + std::to_string(least - 1), "at least " + std::to_string(least)});
}

// Bytes are rounded to slots whose size depends on the budget. Still every budget from the smallest
// on must give a plan.
TEST(Planner, EveryBudgetFromTheLeastOnHasAPlan) {
  std::mt19937 random(5);
  for (int round = 0; round < 4; ++round) {
    ChainProfile profile = random_chain(16, random);
    for (BlockProfile& block : profile.blocks) { // far from whole slots
      block.output_bytes = block.output_bytes * 40'961 + 13;
      block.saved_bytes = block.saved_bytes * 40'961 + 77;
      block.ops_saved_bytes = block.ops_saved_bytes * 40'961 + 5;
    }
    const int64_t least = least_budget(profile);
    for (int64_t more = 0; more < 10; ++more) {
      const int64_t budget = least + more * more * least / 1000;
      EXPECT_LE(plan_activations(profile, budget)->predicted_peak_bytes, budget)
          << round << ", " << more;
    }
  }
}

TEST(Planner, IsNeverSlowerThanASimpleRuleAtTheRulesPeak) {
  std::mt19937 random(6);
  for (int round = 0; round < 4; ++round) {
    ChainProfile profile = random_chain(30, random, round % 2 == 1);
    for (BlockProfile& block : profile.blocks) { // far from whole slots
      block.output_bytes = block.output_bytes * 40'961 + 13;
      block.saved_bytes = block.saved_bytes * 40'961 + 77;
    }
    for (const auto& rule : {keep_all_regions(30), sqrt_regions(30), each_block_regions(30)}) {
      const PlanCost cost = plan_cost(profile, rule);
      const auto plan = plan_activations(profile, cost.peak_bytes);
      EXPECT_LE(plan->predicted_seconds, cost.seconds) << round;
      EXPECT_LE(plan->predicted_peak_bytes, cost.peak_bytes) << round;
    }
  }
}

// In a homogeneous chain only one block at a time can be kept. Then the plan has Revolve's number of
// block forwards (Griewank and Walther): r l - binom(c + r, r - 1) for c checkpoints.
TEST(Planner, CountsAsRevolveDoes) {
  constexpr int kBlocks = 10;
  ChainProfile profile;
  for (int i = 0; i < kBlocks; ++i) {
    BlockProfile block;
    block.forward_seconds = block.recompute_seconds = 1;
    block.output_bytes = 1;
    block.saved_bytes = 30; // two of these do not fit; all blocks' outputs would
    block.dropped_peak = 1;
    block.ops_saved_bytes = 1000;
    profile.blocks.push_back(block);
  }
  const auto binomial = [](int n, int k) {
    double value = 1;
    for (int i = 1; i <= k; ++i) {
      value = value * (n - k + i) / i;
    }
    return value;
  };
  for (int checkpoints = 2; checkpoints <= 5; ++checkpoints) {
    int r = 0;
    while (binomial(checkpoints + r, checkpoints) < kBlocks) {
      ++r;
    }
    const double advances = r * kBlocks - binomial(checkpoints + r, r - 1);
    // The memory is a block for its backward, its output's gradient, and the inputs of waiting ranges.
    // The input of the chain is not counted.
    const int64_t bytes = 30 + 1 + checkpoints;
    // Each block runs once more to be kept for its own backward.
    EXPECT_EQ(plan_whole_blocks(profile, bytes)->predicted_seconds, advances + kBlocks)
        << checkpoints;
  }
}

TEST(Planner, ProfileMeasuresBlocksAndChangesNothing) {
  torch::manual_seed(4);
  Straight model(4, 64);
  const Tensor x = on_device::randn({256, 64});
  const auto loss = [&] { return model->forward(x).square().sum(); };
  loss().backward();
  std::vector<Tensor> before;
  for (const Tensor& parameter : model->parameters()) {
    before.push_back(parameter.grad().clone());
  }
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  const ChainProfile profile = profile_activations(model.ptr(), loss);
  EXPECT_TRUE(torch::equal(state, at::detail::getDefaultCPUGenerator().get_state()));
  const auto parameters = model->parameters();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(before[i], parameters[i].grad()));
  }
  EXPECT_FALSE(gradient_checkpointing_enabled(model.ptr()));
  ASSERT_EQ(profile.blocks.size(), 4);
  const BlockProfile& block = profile.blocks[1];
  constexpr int64_t kWide = 256 * 64 * 4; // bytes of a block's output
  EXPECT_EQ(block.name, "block1");
  EXPECT_TRUE(block.random);
  EXPECT_EQ(block.output_bytes, kWide);
  // up's output, gelu's (both twice as wide), dropout's mask of a byte or a float.
  EXPECT_GE(block.saved_bytes, 5 * kWide);
  EXPECT_LE(block.saved_bytes, 8 * kWide);
  EXPECT_LT(block.ops_saved_bytes, block.saved_bytes);
  EXPECT_GE(block.ops_saved_bytes, 3 * kWide);
  EXPECT_GT(block.forward_seconds, 0);
  EXPECT_LE(block.recompute_seconds, 2 * block.forward_seconds);
  // Other shapes have another hash, and plans check it.
  const Tensor wide = on_device::randn({8, 64});
  const ChainProfile other =
      profile_activations(model.ptr(), [&] { return model->forward(wide).sum(); });
  EXPECT_NE(profile.shapes_hash, other.shapes_hash);
  const auto plan = plan_activations(profile, full_budget(profile));
  EXPECT_NO_THROW(plan->require_shapes(profile));
  expect_says(error_of<std::exception>([&] { plan->require_shapes(other); }),
              {plan->shapes_hash, other.shapes_hash});
  expect_says(error_of<std::exception>([&] {
                auto bare = on_device::moved(torch::nn::Linear(4, 4));
                profile_activations(bare.ptr(),
                                    [&] { return bare(on_device::ones({2, 4})).sum(); });
              }),
              {"blocks=0", "call_block"});
}

TEST(Planner, ProfileLeavesRunningStatistics) {
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4),
                              torch::nn::Linear(4, 4));
  on_device::moved(model);
  const Tensor x = on_device::randn({8, 4});
  profile_activations(model.ptr(), [&] { return model->forward(x).sum(); });
  for (const auto& buffer : model->named_buffers()) {
    const bool ones = buffer.key().ends_with("running_var");
    EXPECT_TRUE(buffer.value().eq(ones ? 1 : 0).all().item<bool>()) << buffer.key();
  }
}

TEST(Planner, KeepsWithinEveryBudgetWhenRun) {
  torch::manual_seed(4);
  Straight model(8, 32);
  const Tensor x = on_device::randn({128, 32});
  const auto loss = [&] { return model->forward(x).square().sum(); };
  const Derived plain = derive_model(model, x);
  const int64_t full = observe_peak(model.ptr(), loss);
  for (const int percent : {30, 50, 80, 100}) {
    const auto plan =
        enable_within_budget(model.ptr(), loss, "budget:" + std::to_string(percent) + "%");
    EXPECT_LE(plan->observed_peak_bytes, plan->budget_bytes) << percent;
    EXPECT_GT(static_cast<double>(plan->observed_peak_bytes),
              0.5 * static_cast<double>(plan->budget_bytes))
        << percent;
    EXPECT_LE(observe_peak(model.ptr(), loss), plan->budget_bytes);
    EXPECT_LE(plan->budget_bytes, full * percent / 100 + full / 50) << percent;
    expect_same_bits(plain, derive_model(model, x));
    const ActivationPlan read = ActivationPlan::from_json(plan->to_json());
    EXPECT_EQ(read.to_json(), plan->to_json());
  }
  expect_says(
      error_of<std::exception>([&] { enable_within_budget(model.ptr(), loss, "budget:1000"); }),
      {"budget=1000", "at least"});
  EXPECT_FALSE(gradient_checkpointing_enabled(model.ptr()));
}

// Blocks that keep operators inside regions keep them only in the region's recomputation.
TEST(Planner, PeaksOfNestedPlansAreAsPredicted) {
  torch::manual_seed(4);
  Straight model(6, 32);
  const Tensor x = on_device::randn({256, 32});
  const auto loss = [&] { return model->forward(x).square().sum(); };
  const Derived plain = derive_model(model, x);
  const ChainProfile profile = profile_activations(model.ptr(), loss);
  const auto keep = BlockChoice::keep;
  const auto ops = BlockChoice::keep_ops;
  const std::vector<std::vector<PlanRegion>> plans = {
      {{0, 3, keep}, {0, 1, ops}, {1, 2, ops}, {4, 5, ops}},
      {{0, 5, keep}, {0, 3, keep}, {0, 1, ops}, {1, 2, ops}, {3, 4, ops}},
      {{0, 2, keep}, {2, 4, keep}, {2, 3, ops}, {4, 5, keep}}};
  for (const auto& regions : plans) {
    const auto plan = make_plan(profile, regions);
    gradient_checkpointing_enable(model.ptr(), {.plan = plan});
    const int64_t predicted = plan->predicted_peak_bytes;
    const int64_t observed = observe_peak(model.ptr(), loss);
    EXPECT_LE(observed, predicted + predicted / 100);
    EXPECT_GE(observed, predicted - predicted / 10);
    expect_same_bits(plain, derive_model(model, x));
  }
}

TEST(Planner, RefusesFilesThatAreNoPlans) {
  ActivationPlan plan;
  plan.blocks = {"a", "b", "c"};
  plan.regions = {{0, 2}, {1, 2}};
  EXPECT_NO_THROW(ActivationPlan::from_json(plan.to_json()));
  for (const std::vector<PlanRegion>& regions : {std::vector<PlanRegion>{{0, 4}},
                                                 {{1, 1}},
                                                 {{0, 2}, {1, 3}},
                                                 {{1, 2}, {0, 1}},
                                                 {{0, 2, BlockChoice::keep_ops}}}) {
    plan.regions = regions;
    expect_says(
        error_of<std::exception>([&] { ActivationPlan::from_json(plan.to_json(), "p.json"); }),
        {"p.json", "region=["});
  }
  expect_says(
      error_of<std::exception>([] { ActivationPlan::from_json({{"version", 2}}, "p.json"); }),
      {"p.json", "version=2"});
}

TEST(Planner, DrawsTheCurve) {
  std::mt19937 random(3);
  const ChainProfile profile = random_chain(12, random);
  const auto plans = pareto_plans(profile);
  ASSERT_GE(plans.size(), 4u);
  for (size_t i = 1; i < plans.size(); ++i) {
    EXPECT_LT(plans[i]->predicted_seconds, plans[i - 1]->predicted_seconds);
  }
  const std::string table = pareto_table(profile, plans);
  expect_says(table, {"keep everything", "sqrt(n) regions", "each block"});
  expect_says(pareto_svg(profile, plans), {"<svg", "<polyline", "</svg>", "peak"});
}

TEST(Planner, AShareBelowWhatNoPlanChangesIsThatAndAShareOfTheRest) {
  std::mt19937 random(3);
  ChainProfile profile = random_chain(6, random);
  const auto full = [&] { return plan_cost(profile, keep_all_regions(6)).peak_bytes; };
  EXPECT_EQ(budget_of(profile, "budget:50%"), full() / 2);
  // The gradient of a word embedding is five sixths of the total.
  profile.first_peak_bytes = full() * 5 / 6;
  const int64_t budget = budget_of(profile, "budget:50%");
  EXPECT_GE(budget, profile.first_peak_bytes);
  EXPECT_LT(budget, full());
  EXPECT_LE(plan_activations(profile, budget)->predicted_peak_bytes, budget);
}

} // namespace hasten::checkpoint_test
