// Planned regions of models with operations between their blocks: random draws, autocast, run_once;
// and plans of sharded blocks.
#include "activation_checkpoint/block_rig.h"
#include "hasten/core/autocast.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

// A block that draws random numbers, optionally under autocast, and calls run_once.
struct DrawingImpl : torch::nn::Module {
  explicit DrawingImpl(int64_t width)
      : linear(register_module("linear", on_device::moved(torch::nn::Linear(width, width)))) {}
  Tensor forward(const Tensor& x) {
    const Tensor scale = run_once([&] {
      ++asked;
      return on_device::full({1}, 1.5);
    });
    return (at::dropout(linear(x), 0.3, is_training()) + on_device::randn({3, 1}))
               .to(at::kFloat)
               .tanh() *
           scale;
  }
  torch::nn::Linear linear;
  int asked = 0;
};
TORCH_MODULE(Drawing);

// Draws random numbers between blocks, and runs every second block in bf16.
struct AlternatingImpl : torch::nn::Module {
  explicit AlternatingImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      blocks.emplace_back(8);
      register_module("block" + std::to_string(i), blocks.back());
    }
  }
  Tensor forward(const Tensor& x, int64_t count) {
    Tensor y = x;
    for (int64_t i = 0; i < count; ++i) {
      const hasten::Autocast autocast(
          {.device = testing_support::run_device().type(), .enabled = i % 2 == 1});
      y = call_block(blocks[static_cast<size_t>(i)], y);
      y = y + on_device::rand({8});
    }
    return y;
  }
  int asked() {
    int all = 0;
    for (Drawing& block : blocks) {
      all += std::exchange(block->asked, 0);
    }
    return all;
  }
  std::vector<Drawing> blocks;
};
TORCH_MODULE(Alternating);

static std::shared_ptr<const ActivationPlan> plan_for_alternating(const Alternating& model,
                                                                  std::vector<PlanRegion> regions) {
  auto plan = std::make_shared<ActivationPlan>();
  for (size_t i = 0; i < model->blocks.size(); ++i) {
    plan->blocks.push_back("block" + std::to_string(i));
  }
  plan->regions = std::move(regions);
  return plan;
}

TEST(PlannedRegions, DrawsAutocastAndRunOnceAreThoseOfForward) {
  torch::manual_seed(4);
  Alternating model(5);
  const Tensor x = on_device::randn({3, 8});
  const auto run = [&](int64_t count) {
    return derive(model->parameters(), [&] { return model->forward(x, count).square().sum(); });
  };
  using Regions = std::vector<PlanRegion>;
  // A model that stops before the end of a region also works.
  for (const int64_t count : {5, 3}) {
    gradient_checkpointing_disable(model.ptr());
    const Derived plain = run(count);
    model->asked();
    for (const Regions& regions : {Regions{{0, 5}},
                                   {{0, 3}, {0, 2}, {1, 2}, {3, 5}},
                                   {{1, 5}, {2, 4}, {2, 3}},
                                   {{0, 1}, {1, 2, BlockChoice::keep_ops}, {2, 5}, {2, 4}}}) {
      gradient_checkpointing_enable(model.ptr(), {.plan = plan_for_alternating(model, regions)});
      for (int round = 0; round < 2; ++round) {
        expect_same_bits(plain, run(count));
        EXPECT_EQ(model->asked(), count) << regions.size();
      }
    }
  }
  gradient_checkpointing_disable(model.ptr());
}

// Passes that do not start where the previous one ended, and one that starts at the first block
// although the previous one was not complete.
TEST(PlannedRegions, APassThatIsLeftOffIsForgotten) {
  torch::manual_seed(4);
  Straight model(4);
  const Tensor x = on_device::randn({4, 8});
  const auto pass = [&](std::vector<size_t> blocks) {
    Tensor y = x;
    for (const size_t i : blocks) {
      y = call_block(model->blocks[i], y);
    }
    return y.square().sum();
  };
  const auto run = [&] {
    return derive(model->parameters(), [&] {
      return pass({0, 1}) + pass({3}) + pass({0}) + pass({0, 1, 2, 3}) + pass({1, 2}) + pass({1});
    });
  };
  const Derived plain = run();
  for (const auto& regions : {std::vector<PlanRegion>{{0, 4}}, {{0, 2}, {1, 2}, {2, 4}}}) {
    gradient_checkpointing_enable(model, {.plan = plan_of(*model, regions)});
    expect_same_bits(plain, run());
    expect_same_bits(plain, run());
  }
  gradient_checkpointing_disable(model);
}

TEST(PlannedRegions, APassThatIsLeftOffIsFreed) {
  std::weak_ptr<torch::nn::Module> block;
  {
    Straight model(4);
    gradient_checkpointing_enable(model, {.plan = plan_of(*model, {{0, 4}})});
    call_block(model->blocks[0], on_device::randn({4, 8})).sum().backward();
    block = model->blocks[0].ptr();
    gradient_checkpointing_disable(model);
  }
  EXPECT_TRUE(block.expired());
}

} // namespace hasten::checkpoint_test
