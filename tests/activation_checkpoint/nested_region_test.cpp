// Nested regions: a saved tensor belongs to the innermost region, the inputs of a region to the one
// around it.
#include "activation_checkpoint/region_rig.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

// Blocks [first, last) as a tree of regions: each half is a region.
static Tensor run_tree(std::vector<Mlp>& blocks, size_t first, size_t last, const Tensor& x) {
  if (last - first == 1) {
    return activation_checkpoint(
        [&blocks, first](const Tensor& in) { return blocks[first]->forward(in); }, x);
  }
  const size_t middle = (first + last) / 2;
  return activation_checkpoint(
      [&blocks, first, middle, last](const Tensor& in) {
        return run_tree(blocks, middle, last, run_tree(blocks, first, middle, in));
      },
      x);
}

TEST(NestedRegions, GiveTheSameBitsAtAnyDepth) {
  auto blocks = make_mlps(4);
  const Tensor x = on_device::randn({4, 8}).requires_grad_();
  auto leaves = parameters_of(blocks);
  leaves.push_back(x);
  const Derived plain = derive(leaves, [&] {
    Tensor y = x;
    for (Mlp& block : blocks) {
      y = block->forward(y);
    }
    return y.square().sum();
  });
  for (const bool early_stop : {true, false}) {
    const EarlyStopGuard guard(early_stop);
    for (Mlp& block : blocks) {
      block->calls = 0;
    }
    const Recomputes counted;
    expect_same_bits(plain,
                     derive(leaves, [&] { return run_tree(blocks, 0, 4, x).square().sum(); }));
    // Outer region, two halves, four blocks. A region whose last part is a region stops when that
    // part's inputs exist, without running it.
    EXPECT_EQ(counted.count(), 7);
    EXPECT_EQ(counted.early(), early_stop ? 7 : 0);
    EXPECT_EQ(blocks[0]->calls, early_stop ? 4 : 4);
    EXPECT_EQ(blocks[3]->calls, early_stop ? 2 : 4);
  }
}

TEST(NestedRegions, TwoChildrenOneGraphAndOtherThings) {
  const Tensor x = on_device::randn({6}, torch::kDouble).requires_grad_();
  const auto fn = [](bool region, const Tensor& in) {
    const auto child = [](const Tensor& t, int power) {
      return std::make_pair(t.sin().pow(power).exp(), power + 1);
    };
    auto [a, two] = region ? activation_checkpoint(child, in, 1) : child(in, 1);
    auto [b, three] = region ? activation_checkpoint(child, a, two) : child(a, two);
    return (a * b).cos() * three; // of the outer region, from both inner regions' outputs
  };
  const auto second = [&](bool region) {
    const Tensor y = region
                         ? activation_checkpoint([&](const Tensor& in) { return fn(true, in); }, x)
                         : fn(false, x);
    const Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({g.exp().sum()}, {x})[0];
  };
  EXPECT_TRUE(torch::equal(second(false), second(true)));
  // Backward twice through the same graph.
  const Tensor y = activation_checkpoint([&](const Tensor& in) { return fn(true, in); }, x).sum();
  const Tensor first = torch::autograd::grad({y}, {x}, {}, true)[0];
  EXPECT_TRUE(torch::equal(first, torch::autograd::grad({y}, {x})[0]));
}

using Function = std::function<Tensor(const Tensor&)>;
static Function in_region(const Function& fn) {
  return [fn](const Tensor& in) { return activation_checkpoint(fn, in); };
}
static Function gradient_of(const Function& fn) {
  return [fn](const Tensor& in) {
    return torch::autograd::grad({fn(in).sum()}, {in}, {}, true, true)[0];
  };
}

// Third-order gradients, with regions around each of them.
TEST(NestedRegions, AndGradientsInEveryOrder) {
  const auto c = in_region;
  const auto g = gradient_of;
  const Function wave = [](const Tensor& x) { return x.sin().exp().sin(); };
  const Function cosine = [](const Tensor& x) { return x.cos().sin().exp(); };
  const Function derives_inside = [&](const Tensor& x) {
    const Tensor a = wave(x);
    const Tensor b = wave(x);
    torch::autograd::grad({a.sum()}, {x});
    torch::autograd::grad({b.sum()}, {x});
    return x.sin();
  };
  const Function children = [&](const Tensor& x) { return cosine(wave(x)); };
  const Function in_regions = [&](const Tensor& x) { return c(cosine)(c(wave)(x)); };
  const std::vector<std::pair<Function, Function>> functions{
      {wave, wave}, {derives_inside, derives_inside}, {children, in_regions}};
  const Tensor x = on_device::randn({3, 3}, torch::kDouble).requires_grad_();
  for (const bool early_stop : {true, false}) {
    const EarlyStopGuard guard(early_stop);
    for (const auto& [plain, f] : functions) {
      const std::vector<std::pair<Function, std::vector<Function>>> orders{
          {plain, {c(f), c(c(f))}},
          {g(plain), {g(c(f)), g(c(c(f)))}},
          {g(g(plain)), {g(g(c(f))), g(c(g(f))), c(g(g(c(f)))), g(c(g(c(f))))}},
          {g(g(g(plain))), {g(c(g(g(c(f))))), g(c(g(c(g(c(f))))))}}};
      for (const auto& [expected_of, actuals_of] : orders) {
        const Tensor expected = expected_of(x);
        const Tensor expected_next = torch::autograd::grad({expected.sum()}, {x}, {}, true)[0];
        for (const Function& actual_of : actuals_of) {
          const LiveBytes bytes;
          {
            const Tensor actual = actual_of(x);
            EXPECT_TRUE(torch::equal(actual, expected));
            EXPECT_TRUE(torch::equal(torch::autograd::grad({actual.sum()}, {x})[0], expected_next));
          }
          EXPECT_EQ(bytes.extra(), 0) << "the graph is gone";
          actual_of(x);
          EXPECT_EQ(bytes.extra(), 0) << "and without a backward";
        }
      }
    }
  }
}

TEST(NestedRegions, AnInnerRegionKeepsNothingEither) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const auto step = [](const Tensor& in) { return in.sin().cos().tanh(); };
  const auto tree = [&](const Tensor& in) {
    Tensor y = in;
    for (int i = 0; i < 8; ++i) {
      y = activation_checkpoint(step, y);
    }
    return y;
  };
  activation_checkpoint(tree, x).sum().backward();
  const LiveBytes bytes;
  {
    const Tensor flat = tree(x);
    EXPECT_EQ(bytes.extra(), 8 * 4096) << "one input a region";
  }
  const Tensor nested = activation_checkpoint(tree, x);
  EXPECT_EQ(bytes.extra(), 4096);
  nested.sum().backward({}, true);
  EXPECT_EQ(bytes.extra(), 4096);
}

TEST(NestedRegions, BackwardInsideAnOuterRegionGoesThroughAnInnerOne) {
  const Tensor x = on_device::randn({5}, torch::kDouble).requires_grad_();
  const auto fn = [](bool region, const Tensor& in) {
    const auto child = [](const Tensor& t) { return t.exp().sin().exp(); };
    const Tensor y = region ? activation_checkpoint(child, in) : child(in);
    return y.cos() * torch::autograd::grad({y.sum()}, {in}, {}, true, true)[0];
  };
  expect_same_bits(
      derive({x}, [&] { return fn(false, x).sum(); }), derive({x}, [&] {
        return activation_checkpoint([&](const Tensor& in) { return fn(true, in); }, x).sum();
      }));
}

TEST(NestedRegions, ADetachedChildIsNeverRecomputed) {
  auto blocks = make_mlps(2);
  const Tensor x = on_device::randn({4, 8}).requires_grad_();
  Tensor y = activation_checkpoint(
      [&](const Tensor& in) {
        const Tensor still =
            activation_checkpoint([&](const Tensor& t) { return blocks[0]->forward(t); }, in)
                .detach();
        return blocks[1]->forward(still + in);
      },
      x);
  blocks[0]->calls = blocks[1]->calls = 0;
  const Recomputes counted;
  y.sum().backward();
  EXPECT_EQ(counted.count(), 1);
  EXPECT_EQ(blocks[0]->calls, 1) << "by the outer region alone";
  EXPECT_TRUE(x.grad().defined());
}

} // namespace hasten::checkpoint_test
