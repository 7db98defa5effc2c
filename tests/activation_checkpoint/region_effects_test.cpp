// Side effects of forward happen once: statistics, counters, collectives. Autocast is restored.
#include <ATen/autocast_mode.h>

#include "activation_checkpoint/region_rig.h"
#include "hasten/activation_checkpoint/op_policy.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

TEST(RegionEffects, BatchNormCountsABatchOnce) {
  torch::manual_seed(1);
  torch::nn::Sequential net(
      torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 3, 3)), torch::nn::BatchNorm2d(3),
      torch::nn::ReLU(), torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 2, 3)),
      torch::nn::InstanceNorm2d(torch::nn::InstanceNorm2dOptions(2).track_running_stats(true)));
  on_device::moved(net);
  auto other = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  const Tensor x = on_device::randn({4, 2, 8, 8});
  for (int batch = 0; batch < 2; ++batch) {
    net->forward(x + batch).square().sum().backward();
    activation_checkpoint([&](const Tensor& in) { return other->forward(in); }, x + batch)
        .square()
        .sum()
        .backward();
  }
  const auto expected = net->named_buffers();
  ASSERT_EQ(expected.size(), 6);
  for (const auto& buffer : other->named_buffers()) {
    EXPECT_TRUE(torch::equal(buffer.value(), expected[buffer.key()])) << buffer.key();
  }
  EXPECT_EQ(expected["1.num_batches_tracked"].item<int64_t>(), 2);
  const auto gradients = other->parameters();
  for (size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(torch::equal(gradients[i].grad(), net->parameters()[i].grad()));
  }
}

TEST(RegionEffects, TensorsFromOutsideAreWrittenOnce) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  Tensor counter = on_device::zeros({1});
  Tensor last = on_device::zeros({2, 4});
  std::vector<Tensor> list{on_device::zeros({2}), on_device::zeros({2})};
  const auto version = [&] { return counter._version(); };
  Tensor y = activation_checkpoint(
      [&](const Tensor& in) {
        const at::Tensor inner = in.detach().clone();
        inner.add_(1); // made in the region, so it is recomputed
        {
          const at::NoGradGuard no_grad;
          counter.add_(1);
          last.select(0, 1).copy_(in.detach());
          at::_foreach_add_(list, 1.0);
          at::add_out(last, last, on_device::ones({4}));
        }
        return (in * inner).sin() * counter.detach().clone();
      },
      x);
  const auto after_forward = version();
  const Tensor kept = last.clone();
  y.sum().backward();
  EXPECT_EQ(counter.item<float>(), 1);
  EXPECT_EQ(version(), after_forward);
  EXPECT_TRUE(torch::equal(last, kept));
  EXPECT_EQ(list[1].sum().item<float>(), 2);
  const Tensor v = x.detach();
  EXPECT_TRUE(torch::allclose(x.grad(), (v * (v + 1)).cos() * (v + 1)));
}

// Three normal numbers are made as four; the next call uses the fourth.
TEST(RegionEffects, AWaitingNormalNumberIsPartOfTheRandomState) {
  const Tensor x = on_device::randn({3}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    return (in * on_device::randn({3})).sin() * on_device::randn({3});
  };
  const auto run = [&](bool region) {
    return derive({x}, [&] {
      const Tensor odd = on_device::randn({1});
      const Tensor y = region ? activation_checkpoint(fn, x) : fn(x);
      return (y * odd * on_device::randn({3})).sum();
    });
  };
  expect_same_bits(run(false), run(true));
}

TEST(RegionEffects, RunOnceRunsOnceAlsoInNestedRegions) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  int calls = 0;
  const auto inner = [&](const Tensor& in) {
    const Tensor scale = run_once([&] {
      EXPECT_FALSE(in_recompute());
      return on_device::full({1}, static_cast<double>(++calls));
    });
    return in.sin() * scale;
  };
  const auto outer = [&](const Tensor& in) {
    Tensor y = in;
    for (int i = 0; i < 3; ++i) {
      y = activation_checkpoint(inner, y);
    }
    return y * run_once([&] { return on_device::full({1}, double(++calls)); });
  };
  const Tensor y = activation_checkpoint(outer, x);
  EXPECT_EQ(calls, 4);
  const Tensor region = torch::autograd::grad({y.sum()}, {x}, {}, true)[0];
  EXPECT_TRUE(torch::equal(region, torch::autograd::grad({y.sum()}, {x})[0]));
  EXPECT_EQ(calls, 4);
  calls = 0;
  const Tensor z = x.sin().mul(1).sin().mul(2).sin().mul(3) * 4;
  EXPECT_TRUE(torch::allclose(region, torch::autograd::grad({z.sum()}, {x})[0]));
}

// A policy counts calls of operators. The recomputation does not make these calls.
TEST(RegionEffects, WhatRunsOnceIsNoOperatorOfAPolicy) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    const Tensor scale = run_once([&] { return in.exp().sum() * 0.5; });
    return (in * scale).sin().exp() * in;
  };
  const Derived plain = derive({x}, [&] { return fn(x).sum(); });
  for (const bool debug : {false, true}) {
    expect_same_bits(
        plain, derive({x}, [&] {
          return activation_checkpoint(
                     fn, x,
                     Options{.policy = OpPolicy::keep({"aten::exp", "aten::mul"}), .debug = debug})
              .sum();
        }));
  }
}

TEST(RegionEffects, CodeKnowsWhichRunItIs) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  std::vector<bool> inner;
  std::vector<bool> outer;
  const auto child = [&](const Tensor& in) {
    inner.push_back(in_recompute());
    return in.sin().exp();
  };
  activation_checkpoint(
      [&](const Tensor& in) {
        outer.push_back(in_recompute());
        return activation_checkpoint(child, in).cos();
      },
      x)
      .sum()
      .backward();
  EXPECT_EQ(outer, (std::vector<bool>{false, true}));
  EXPECT_EQ(inner, (std::vector<bool>{false, true, true}));
  EXPECT_FALSE(in_recompute());
}

// bf16, as amp's scope sets it.
struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(run_device().type(), true);
    at::autocast::set_autocast_dtype(run_device().type(), at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(run_device().type(), false);
  }
};

TEST(RegionEffects, AutocastIsThatOfForward) {
  install_memory_meter(); // before what later runs replace
  auto blocks = make_mlps(1);
  const Tensor x = on_device::randn({4, 8});
  const auto leaves = parameters_of(blocks);
  // The weights are used three times, so their casts are cached: by an earlier plain call and by
  // two regions.
  const auto run = [&](bool regions) {
    return derive(leaves, [&] {
      Tensor y = x;
      {
        const Autocast autocast;
        for (int i = 0; i < 3; ++i) {
          const auto fn = [&](const Tensor& in) {
            const Tensor out = blocks[0]->forward(in);
            EXPECT_EQ(blocks[0]->up(in).scalar_type(),
                      at::kBFloat16); // in recomputation too
            return out.tanh();
          };
          y = regions && i > 0 ? activation_checkpoint(fn, y) : fn(y);
        }
      }
      const Tensor loss = y.to(at::kFloat).sum();
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      return loss;
    });
  };
  const Derived plain = run(false);
  expect_same_bits(plain, run(true));
  const LiveBytes bytes;
  run(true);
  EXPECT_EQ(bytes.extra(), 0) << "no cast of the recomputation stays";
}

TEST(RegionEffects, AutocastAroundBackwardDoesNotReachIn) {
  auto blocks = make_mlps(1);
  const Tensor x = on_device::randn({4, 8});
  const auto run = [&](bool region) {
    return derive(parameters_of(blocks), [&] {
      const auto fn = [&](const Tensor& in) {
        const Tensor out = blocks[0]->forward(in);
        EXPECT_EQ(out.scalar_type(), at::kFloat); // in recomputation too
        return out.tanh().exp();
      };
      const Tensor loss = (region ? activation_checkpoint(fn, x) : fn(x)).sum();
      const Autocast autocast;
      loss.backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(at::autocast::is_autocast_enabled(run_device().type()));
      return loss;
    });
  };
  expect_same_bits(run(false), run(true));
}

} // namespace hasten::checkpoint_test
