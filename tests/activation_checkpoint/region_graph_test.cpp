// Regions as part of a graph: hooks, backward inside backward, lifetimes, and where a recomputation
// ends.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "activation_checkpoint/region_rig.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

static void add_post_hook(torch::autograd::Node& node, const std::function<void()>& hook) {
  node.add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [hook](const variable_list& outputs, const variable_list&) {
        hook();
        return outputs;
      }));
}

TEST(RegionGraph, ManyRegionsOfOneModuleJoinInOneBackward) {
  auto blocks = make_mlps(1);
  for (const bool input_wants_gradient : {true, false}) {
    std::vector<Tensor> leaves = parameters_of(blocks);
    std::vector<Tensor> inputs;
    for (int i = 0; i < 50; ++i) {
      inputs.push_back(on_device::rand({1, 8}).set_requires_grad(input_wants_gradient));
    }
    if (input_wants_gradient) {
      leaves.insert(leaves.end(), inputs.begin(), inputs.end());
    }
    const auto run = [&](bool regions) {
      return derive(leaves, [&] {
        const auto fn = [&](const Tensor& in) { return blocks[0]->forward(in); };
        std::vector<Tensor> features;
        for (const Tensor& input : inputs) {
          features.push_back(regions ? activation_checkpoint(fn, input) : fn(input));
        }
        return at::stack(features).square().mean();
      });
    };
    const Derived plain = run(false);
    const Recomputes counted;
    expect_same_bits(plain, run(true));
    EXPECT_EQ(counted.count(), 50);
  }
}

TEST(RegionGraph, AParameterUsedInsideAndOutsideFiresItsHookOnce) {
  const Tensor w = on_device::randn({4}).requires_grad_();
  const Tensor x = on_device::randn({4}).requires_grad_();
  int fired = 0;
  w.register_hook([&](const Tensor&) { ++fired; });
  const auto fn = [&](const Tensor& in) { return w * in; };
  const Derived plain = derive({w, x}, [&] { return fn(w * x).sum(); });
  fired = 0;
  expect_same_bits(plain, derive({w, x}, [&] { return activation_checkpoint(fn, w * x).sum(); }));
  EXPECT_EQ(fired, 1);
}

TEST(RegionGraph, HooksInsideFireOnceThoughForwardRanTwice) {
  for (const bool early_stop : {true, false}) {
    const EarlyStopGuard guard(early_stop);
    const Tensor x = on_device::randn({4}).requires_grad_();
    int on_tensor = 0;
    int on_node = 0;
    const Tensor y = activation_checkpoint(
        [&](const Tensor& in) {
          const Tensor sine = in.sin();
          sine.register_hook([&](const Tensor&) { ++on_tensor; });
          return sine.cos().sin();
        },
        x);
    add_post_hook(*y.grad_fn()->next_edge(0).function, [&] { ++on_node; });
    const Recomputes counted;
    y.sum().backward();
    EXPECT_EQ(counted.count(), 1);
    EXPECT_EQ(on_tensor, 1);
    EXPECT_EQ(on_node, 1) << "the graph of forward is the one derived";
  }
}

TEST(RegionGraph, ABackwardInsideABackwardGoesThroughTheSameRegion) {
  for (const bool early_stop : {true, false}) {
    const EarlyStopGuard guard(early_stop);
    const Tensor x = on_device::randn({4}).requires_grad_();
    const auto fn = [](const Tensor& in) {
      const Tensor middle = in.sin().cos();
      return std::make_pair(middle, middle.sin());
    };
    const auto run = [&](bool region) {
      return derive({x}, [&] {
        auto [middle, y] = region ? activation_checkpoint(fn, x) : fn(x);
        const Tensor loss = middle.sum();
        const Tensor last = y.sum();
        const auto inside = std::make_shared<bool>(false);
        add_post_hook(*y.grad_fn(), [loss, inside] {
          if (!std::exchange(*inside, true)) {
            loss.backward({}, /*retain_graph=*/true);
          }
        });
        last.backward({}, /*retain_graph=*/true);
        EXPECT_TRUE(*inside);
        return last + 0;
      });
    };
    const Derived plain = run(false);
    const Recomputes counted;
    expect_same_bits(plain, run(true));
    EXPECT_EQ(counted.count(), 3) << "one for each backward call";
  }
}

TEST(RegionGraph, OutsideOfBackwardEachUnpackingRecomputes) {
  using torch::autograd::SavedVariable;
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  std::optional<SavedVariable> saved;
  const LiveBytes bytes;
  const Tensor y = activation_checkpoint(
      [&](const Tensor& in) {
        const Tensor sine = in.sin();
        SavedVariable again(sine, /*is_output=*/false);
        if (!in_recompute()) {
          saved.emplace(std::move(again));
        }
        return sine.exp();
      },
      x);
  const Recomputes counted;
  for (int i = 1; i <= 2; ++i) {
    EXPECT_TRUE(torch::equal(saved->unpack(), x.sin()));
    EXPECT_EQ(counted.count(), i);
    EXPECT_EQ(bytes.extra(), 4096) << "the output alone";
  }
  y.sum().backward();
  EXPECT_EQ(counted.count(), 3);
}

static const void* seen_by_backward = nullptr;
struct SavesAnInput : torch::autograd::Function<SavesAnInput> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& scale) {
    context->save_for_backward({scale});
    return x * scale;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Tensor scale = context->get_saved_variables()[0];
    seen_by_backward = scale.const_data_ptr();
    return {gradients[0] * scale, Tensor()};
  }
};

TEST(RegionGraph, ASavedInputIsTheInputsOwnMemory) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  const Tensor scale = on_device::randn({4});
  activation_checkpoint([](const Tensor& a, const Tensor& b) { return SavesAnInput::apply(a, b); },
                        x, scale)
      .sum()
      .backward();
  EXPECT_EQ(seen_by_backward, scale.const_data_ptr());
}

TEST(RegionGraph, BackwardFreesAsItGoesAlsoWhereTheGraphIsRetained) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const auto alive = [&](bool region, bool retain_graph) {
    const LiveBytes bytes;
    std::vector<int64_t> steps;
    const auto fn = [&](const Tensor& in) {
      Tensor y = in;
      for (int i = 0; i < 4; ++i) {
        y = y.square();
        if (!in_recompute() && i < 3) {
          y.register_hook([&](const Tensor&) { steps.push_back(bytes.extra()); });
        }
      }
      return y.sum();
    };
    (region ? activation_checkpoint(fn, x) : fn(x)).backward({}, retain_graph);
    return steps;
  };
  const std::vector<int64_t> plain = alive(false, false);
  ASSERT_EQ(plain.size(), 3);
  EXPECT_EQ(plain[1] - plain[0], -4096);
  EXPECT_EQ(plain[2] - plain[1], -4096);
  EXPECT_EQ(alive(true, false), plain);
  EXPECT_EQ(alive(true, true), plain);
  const std::vector<int64_t> kept = alive(false, true);
  EXPECT_EQ(kept[2], kept[0]) << "the plain graph keeps: the test can fail";
}

struct SavesItsOutput : torch::autograd::Function<SavesItsOutput> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    const Tensor y = x.exp();
    context->save_for_backward({y, x});
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0]};
  }
};

// If the recomputation ended while the function saves its output, the output and the function's node
// would own each other.
TEST(EarlyStop, ACustomFunctionThatSavesItsOutputIsNotKept) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const LiveBytes bytes;
  const Recomputes counted;
  activation_checkpoint([](const Tensor& in) { return SavesItsOutput::apply(in.sin()).clone(); }, x)
      .sum()
      .backward();
  EXPECT_EQ(counted.early(), 1);
  EXPECT_EQ(bytes.extra(), 0);
}

// The engine runs the backward inside the region. Stopping in the middle would leave this thread's
// engine in a bad state.
TEST(EarlyStop, DoesNotEndInsideABackwardOfTheRegionItself) {
  const Tensor x = on_device::randn({1024}, torch::kDouble).requires_grad_();
  const auto fn = [](const Tensor& in) {
    return torch::autograd::grad({in.exp().sin().sum()}, {in}, {}, true, true)[0];
  };
  const Derived plain = derive({x}, [&] { return fn(x).sum(); });
  const LiveBytes bytes;
  for (int i = 0; i < 70; ++i) { // the engine's limit of depth is 60
    expect_same_bits(plain, derive({x}, [&] { return activation_checkpoint(fn, x).sum(); }));
  }
  EXPECT_EQ(bytes.extra(), 0);
}

TEST(EarlyStop, TheGuardOfForwardBeatsTheOption) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  int entered = 0;
  const auto region = [&](bool early_stop) {
    return activation_checkpoint(
        [&](const Tensor& in) {
          const Tensor y = in.sin().cos();
          ++entered; // backward does not need the copy, which saves nothing
          return y.clone();
        },
        x, Options{.early_stop = early_stop});
  };
  const auto runs = [&](const std::function<Tensor()>& forward) {
    entered = 0;
    forward().sum().backward();
    return entered;
  };
  EXPECT_EQ(runs([&] { return region(Options().early_stop); }), 1);
  EXPECT_EQ(runs([&] { return region(true); }), 1);
  EXPECT_EQ(runs([&] { return region(false); }), 2);
  // The guards no longer exist in backward.
  const auto guarded = [&](bool guard, bool early_stop) {
    return runs([&] {
      const EarlyStopGuard scope(guard);
      return region(early_stop);
    });
  };
  EXPECT_EQ(guarded(true, false), 1);
  EXPECT_EQ(guarded(false, true), 2);
  EXPECT_EQ(runs([&] {
              const EarlyStopGuard outer(false);
              const EarlyStopGuard inner(true);
              return region(false);
            }),
            1);
}

TEST(EarlyStop, RunsNoKernelThatBackwardDoesNotNeed) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const Tensor ones = on_device::ones({1024});
  install_memory_meter();
  int calls = 0;
  const auto sine = [&](const Tensor& in) {
    ++calls;
    return in.sin();
  };
  // The number of allocations of a backward.
  const auto made = [&](const Tensor& y) {
    const int64_t before = memory_stats(testing_support::run_device()).allocations;
    y.backward(ones);
    return memory_stats(testing_support::run_device()).allocations - before;
  };
  const int64_t plain = made(sine(x));
  for (const bool early_stop : {true, false}) {
    const Options options{.early_stop = early_stop};
    calls = 0;
    const Tensor y = activation_checkpoint(sine, x, options);
    EXPECT_EQ(made(y), plain + (early_stop ? 0 : 1));
    EXPECT_EQ(calls, 2);
    // Nothing is saved, so nothing is unpacked.
    const Recomputes counted;
    activation_checkpoint([](const Tensor& in) { return in.clone(); }, x, options).backward(ones);
    EXPECT_EQ(counted.count(), 0);
  }
}

} // namespace hasten::checkpoint_test
