// Behaviour with another autograd engine, as a Python interpreter would install it.
#include <torch/csrc/autograd/engine.h>

#include "activation_checkpoint/block_rig.h"
#include "hasten/base/log.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;
using torch::autograd::Engine;

class OtherEngine final : public Engine {
 public:
  OtherEngine() { start_device_threads(); }
};
static Engine& other_engine() {
  static auto* engine = new OtherEngine;
  return *engine;
}

// Installs another engine while it lives, and then restores the earlier one.
class OtherEngineInstalled {
 public:
  OtherEngineInstalled() {
    // Installs hasten's engine first, as in a process that loads Python later.
    const Tensor x = on_device::ones({1}).requires_grad_();
    activation_checkpoint([](const Tensor& in) { return in.exp(); }, x);
    before_ = &Engine::get_default_engine();
    torch::autograd::set_default_engine_stub(&other_engine);
  }
  ~OtherEngineInstalled() {
    static Engine* back = before_;
    torch::autograd::set_default_engine_stub(+[]() -> Engine& { return *back; });
  }

 private:
  Engine* before_;
};

TEST(ReentrantCheckpoint, ServesWhereTheEngineIsAnothersAndSaysSoOnce) {
  auto blocks = make_mlps(3);
  const Tensor x = on_device::randn({4, 8});
  const auto leaves = parameters_of(blocks);
  const auto run = [&](bool regions) {
    return derive(leaves, [&] {
      Tensor y = x; // requires no gradient
      for (Mlp& block : blocks) {
        const auto fn = [&](const Tensor& in) { return block->forward(in); };
        y = regions ? activation_checkpoint(fn, y) : fn(y);
      }
      return y.square().sum();
    });
  };
  const Derived plain = run(false);
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  {
    const OtherEngineInstalled other;
    expect_same_bits(plain, run(true));
    expect_same_bits(plain, run(true));
    const Tensor leaf = on_device::randn({3}).requires_grad_();
    const Tensor y = activation_checkpoint([](const Tensor& in) { return in.exp(); }, leaf);
    expect_says(error_of<std::exception>([&] { torch::autograd::grad({y.sum()}, {leaf}); }),
                {"autograd::grad", "another autograd engine"});
    const Tensor twice = activation_checkpoint([](const Tensor& in) { return in.exp(); }, leaf);
    expect_says(error_of<std::exception>([&] {
                  twice.sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
                }),
                {"create_graph", "leave activation checkpointing off"});
    leaf.mutable_grad() = Tensor();
    // A call that threw leaves no state.
    activation_checkpoint([](const Tensor& in) { return in.exp(); }, leaf).sum().backward();
    EXPECT_TRUE(torch::equal(leaf.grad(), leaf.exp()));
    // A region without a gradient works.
    leaf.mutable_grad() = Tensor();
    Tensor still = activation_checkpoint(
        [](const Tensor& in) {
          const at::NoGradGuard no_grad;
          return in.exp();
        },
        leaf);
    (still + leaf).sum().backward();
    EXPECT_TRUE(torch::equal(leaf.grad(), on_device::ones({3})));
    // The region keeps only its inputs and output.
    const Tensor long_leaf = on_device::randn({1000}).requires_grad_();
    const LiveBytes bytes;
    const Tensor kept =
        activation_checkpoint([](const Tensor& in) { return in.sin().cos().exp(); }, long_leaf);
    EXPECT_LT(bytes.extra(), 4000 + 100) << "and the anchor";
  }
  set_log_sink({});
  ASSERT_EQ(lines.size(), 1);
  expect_says(lines[0], {"another autograd engine", "reentrant"});
  // With hasten's engine again, regions are non-reentrant again.
  const Recomputes counted;
  expect_same_bits(plain, run(true));
  EXPECT_EQ(counted.count(), 3);
}

TEST(ReentrantCheckpoint, RunOnceRunsOnce) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  int calls = 0;
  const auto fn = [&](const Tensor& in) {
    const auto draw = [&] { return on_device::full({1}, double(++calls)); };
    return in * run_once(draw) * run_once(draw);
  };
  {
    const OtherEngineInstalled other;
    const Tensor y = activation_checkpoint(
        [&](const Tensor& in) { return activation_checkpoint(fn, in) * 3; }, x);
    y.sum().backward();
  }
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(torch::equal(x.grad(), on_device::full({4}, 6.0)));
}

// Then regions over several blocks are not possible: each block is a region.
TEST(ReentrantCheckpoint, APlanIsRunBlockByBlock) {
  torch::manual_seed(4);
  Straight model(4);
  const Tensor x = on_device::randn({4, 8});
  const Derived plain = derive_model(model, x);
  calls_of(*model);
  gradient_checkpointing_enable(model, {.plan = plan_of(*model, {{1, 4}, {2, 3}})});
  {
    const OtherEngineInstalled other;
    expect_same_bits(plain, derive_model(model, x));
    EXPECT_EQ(calls_of(*model), (std::vector<int>{1, 2, 2, 2}));
  }
  expect_same_bits(plain, derive_model(model, x));
  EXPECT_EQ(calls_of(*model), (std::vector<int>{1, 2, 3, 2}));
  gradient_checkpointing_disable(model);
}

} // namespace hasten::checkpoint_test
