// A region has bit for bit the gradients of the plain call, in every form of backward, and keeps no
// activations.
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "activation_checkpoint/region_rig.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

TEST(ActivationCheckpoint, GivesTheSameBitsWithDropoutAndKeepsTheStream) {
  auto blocks = make_mlps(3);
  const Tensor x = on_device::randn({4, 5, 8}).requires_grad_();
  auto leaves = parameters_of(blocks);
  leaves.push_back(x);
  const auto run = [&](bool regions) {
    return derive(leaves, [&] {
      Tensor y = x;
      for (Mlp& block : blocks) {
        y = regions ? activation_checkpoint(
                          [block](const Tensor& in) mutable { return block->forward(in); }, y)
                    : block->forward(y);
      }
      return y.square().sum();
    });
  };
  const Derived plain = run(false);
  const Recomputes counted;
  expect_same_bits(plain, run(true));
  EXPECT_EQ(counted.count(), 3);
  EXPECT_EQ(counted.early(), 3);
  // If the random state is not restored, dropout draws other masks. So the test can fail.
  const Derived other = derive(leaves, [&] {
    return activation_checkpoint([&](const Tensor& in) { return blocks[0]->forward(in); }, x,
                                 Options{.preserve_rng_state = false})
        .square()
        .sum();
  });
  const Derived right = derive(leaves, [&] { return blocks[0]->forward(x).square().sum(); });
  EXPECT_FALSE(torch::equal(other.gradients[0], right.gradients[0]));
}

struct Mixed {
  Tensor sum;
  std::optional<Tensor> none;
  std::string words;
};
template <typename Visit>
void flatten(Visit& visit, Mixed& mixed) {
  visit(mixed.sum);
  visit(mixed.none);
}

TEST(ActivationCheckpoint, TakesAnyNumberOfTensorsAndOtherThings) {
  const Tensor a = on_device::randn({3}).requires_grad_();
  const Tensor b = on_device::randn({3});
  const Tensor c = on_device::randn({3}).requires_grad_();
  const auto fn = [](const std::vector<Tensor>& list, std::optional<Tensor> none,
                     std::pair<Tensor, int> scaled, const std::string& words,
                     const std::function<Tensor(const Tensor&)>& wave) {
    return std::make_tuple(
        Mixed{list[0].exp() * list[1] + scaled.first.exp() * scaled.second, none, words + "!"},
        wave(list[0]), 7,
        list[0]); // this output is an input, unchanged
  };
  const std::function<Tensor(const Tensor&)> wave = [](const Tensor& in) { return in.sin(); };
  const auto run = [&](bool region) {
    return derive({a, c}, [&] {
      const std::vector<Tensor> list{a, b};
      const std::pair<Tensor, int> scaled{c, 3};
      const std::optional<Tensor> none;
      auto [mixed, sine, seven, input] =
          region ? activation_checkpoint(fn, list, none, scaled, "abc", wave)
                 : fn(list, none, scaled, "abc", wave);
      EXPECT_EQ(mixed.words, "abc!");
      EXPECT_FALSE(mixed.none.has_value());
      EXPECT_EQ(seven, 7);
      EXPECT_TRUE(torch::equal(input, a));
      return mixed.sum.sum() + sine.sum() + input.square().sum();
    });
  };
  for (const bool early_stop : {true, false}) {
    const EarlyStopGuard guard(early_stop);
    expect_same_bits(run(false), run(true));
  }
  // Tensors without memory: their device has no random state.
  const Tensor meta = torch::randn({3}, at::kMeta).requires_grad_();
  activation_checkpoint([](const Tensor& in) { return in.sin(); }, meta).sum().backward();
  EXPECT_TRUE(meta.grad().is_meta());
}

TEST(ActivationCheckpoint, NeedsNoInputThatWantsAGradient) {
  auto blocks = make_mlps(1);
  const Tensor x = on_device::randn({4, 8});
  const auto leaves = parameters_of(blocks);
  expect_same_bits(
      derive(leaves, [&] { return blocks[0]->forward(x).exp().sum(); }), derive(leaves, [&] {
        return activation_checkpoint([&](const Tensor& in) { return blocks[0]->forward(in); }, x)
            .exp()
            .sum();
      }));
  // A region without any gradient, without an input, and under NoGradGuard.
  const Tensor y = activation_checkpoint([](const Tensor& in) { return in.relu(); }, x);
  EXPECT_FALSE(y.requires_grad());
  const Tensor z = activation_checkpoint([&] { return blocks[0]->forward(x); });
  z.sum().backward();
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(activation_checkpoint([&](const Tensor& in) { return blocks[0]->forward(in); }, x)
                   .requires_grad());
}

TEST(ActivationCheckpoint, DetachedPartsAreDetached) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    return std::make_pair(in.exp() * in.sin().detach(), in.cos().detach());
  };
  auto [y, still] = activation_checkpoint(fn, x);
  EXPECT_FALSE(still.requires_grad());
  y.sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), x.detach().exp() * x.detach().sin()));
  // A region that is detached as a whole.
  x.mutable_grad() = Tensor();
  const Recomputes counted;
  for (int i = 1; i <= 3; ++i) {
    Tensor z = activation_checkpoint(
        [](const Tensor& in) {
          const at::NoGradGuard no_grad;
          return in.exp().sin();
        },
        x);
    EXPECT_FALSE(z.requires_grad());
    z += x;
    z.sum().backward();
    EXPECT_EQ(x.grad().sum().item<float>(), 4 * i);
  }
  EXPECT_EQ(counted.count(), 0);
}

TEST(ActivationCheckpoint, SeveralBackwardsRecomputeEachTime) {
  auto blocks = make_mlps(2);
  const Tensor x = on_device::randn({4, 8});
  const auto leaves = parameters_of(blocks);
  const auto run = [&](bool regions) {
    return derive(leaves, [&] {
      Tensor y = x;
      for (Mlp& block : blocks) {
        y = regions ? activation_checkpoint([&](const Tensor& in) { return block->forward(in); }, y)
                    : block->forward(y);
      }
      const Tensor loss = y.square().sum();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward({}, /*retain_graph=*/true);
      return loss;
    });
  };
  const Derived plain = run(false);
  const Recomputes counted;
  expect_same_bits(plain, run(true));
  EXPECT_EQ(counted.count(), 6);
  // If the graph is not retained, the second backward is torch's usual error.
  const Tensor once =
      activation_checkpoint([&](const Tensor& in) { return blocks[0](in); }, x).sum();
  once.backward();
  expect_says(error_of<std::exception>([&] { once.backward(); }), {"second time"});
}

TEST(ActivationCheckpoint, GradInputsAndGradsOfGradsAreRight) {
  const Tensor x = on_device::randn({5}, torch::kDouble).requires_grad_();
  const Tensor w = on_device::randn({5}, torch::kDouble).requires_grad_();
  const auto fn = [&](const Tensor& in) { return (in.sin() * w).exp(); };
  const auto second = [&](bool region) {
    const Tensor y = region ? activation_checkpoint(fn, x) : fn(x);
    const Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({g.square().sum()}, {x, w});
  };
  const auto plain = second(false);
  const auto region = second(true);
  EXPECT_TRUE(torch::equal(plain[0], region[0]));
  EXPECT_TRUE(torch::equal(plain[1], region[1]));
  // backward(inputs=) does not change the other leaves.
  const Tensor y = activation_checkpoint(fn, x).sum();
  y.backward({}, false, false, std::vector<Tensor>{x});
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(w.grad().defined());
}

TEST(ActivationCheckpoint, CodeInsideMayDerive) {
  const Tensor x = on_device::randn({5}, torch::kDouble).requires_grad_();
  const auto fn = [](const Tensor& in) {
    const Tensor y = in.exp().sin();
    // A gradient penalty needs tensors that the region itself saved.
    const Tensor g = torch::autograd::grad({y.sum()}, {in}, {}, true, true)[0];
    return y.cos() * g;
  };
  const auto run = [&](bool region, bool early_stop) {
    return derive({x}, [&] {
      return (region ? activation_checkpoint(fn, x, Options{.early_stop = early_stop}) : fn(x))
          .sum();
    });
  };
  expect_same_bits(run(false, true), run(true, true));
  expect_same_bits(run(false, true), run(true, false));
}

TEST(ActivationCheckpoint, SeveralGraphsAliveAreIndependent) {
  auto blocks = make_mlps(2);
  const auto leaves = parameters_of(blocks);
  const auto run = [&](bool regions) {
    return derive(leaves, [&] {
      std::vector<Tensor> losses;
      for (int batch = 0; batch < 3; ++batch) {
        Tensor y = on_device::randn({4, 8});
        for (Mlp& block : blocks) {
          const auto fn = [&](const Tensor& in) { return block->forward(in); };
          y = regions ? activation_checkpoint(fn, y) : fn(y);
        }
        losses.push_back(y.square().sum());
      }
      losses[2].backward();
      losses[0].backward();
      return losses[1];
    });
  };
  expect_same_bits(run(false), run(true));
}

TEST(ActivationCheckpoint, ThreadsDoNotMeet) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      at::set_num_threads(1);
      auto layer = on_device::moved(torch::nn::Linear(16, 16));
      const Tensor x = on_device::full({4, 16}, 0.1 * (t + 1));
      for (int i = 0; i < 30; ++i) {
        const auto fn = [&](const Tensor& in) { return layer(in).tanh(); };
        layer->zero_grad();
        fn(x).sum().backward();
        const Tensor plain = layer->weight.grad().clone();
        layer->zero_grad();
        activation_checkpoint(fn, x).sum().backward();
        wrong += !torch::equal(plain, layer->weight.grad());
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
  // Two threads run backward on one graph at the same time.
  const Tensor x = on_device::randn({64}).requires_grad_();
  const Tensor y = activation_checkpoint([](const Tensor& in) { return in.sin().exp().cos(); }, x);
  const Tensor expected = torch::autograd::grad({y.sum()}, {x}, {}, true)[0];
  for (auto& thread : threads) {
    thread = std::thread([&] {
      for (int i = 0; i < 20; ++i) {
        wrong += !torch::equal(expected, torch::autograd::grad({y.sum()}, {x}, {}, true)[0]);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
}

// A branch whose output is dropped after forward is recomputed with the other, but not kept.
TEST(ActivationCheckpoint, WhatNoBackwardWillNeedIsNotKept) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const LiveBytes bytes;
  const auto at_the_end = [&](bool both) {
    auto [u, v] = activation_checkpoint(
        [&](const Tensor& in) {
          const Tensor other = both ? in.cos().cos().cos() : in;
          return std::make_pair(in.sin().sin(), other);
        },
        x);
    v = Tensor();
    int64_t seen = 0;
    const auto hook = x.register_hook([&](const Tensor&) { seen = bytes.extra(); });
    u.sum().backward();
    x.remove_hook(hook);
    return seen;
  };
  EXPECT_EQ(at_the_end(true), at_the_end(false));
}

TEST(ActivationCheckpoint, ARegionKeepsItsInputsAndNothingElse) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    Tensor y = in;
    for (int i = 0; i < 10; ++i) {
      y = y.sin();
    }
    return y;
  };
  fn(x).sum().backward();
  x.mutable_grad() = torch::zeros_like(x);
  const LiveBytes bytes;
  {
    const Tensor y = fn(x);
    EXPECT_EQ(bytes.extra(), 10 * 4096);
  }
  Tensor y = activation_checkpoint(fn, x);
  EXPECT_EQ(bytes.extra(), 4096) << "the output";
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(bytes.extra(), 4096) << "what was recomputed is gone";
  // A backward of a part of the region frees the rest at its end.
  auto [u, v] = activation_checkpoint(
      [](const Tensor& in) { return std::make_pair(in.sin().sin(), in.cos().cos()); }, x);
  u.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(bytes.extra(), 3 * 4096);
  y = u = v = Tensor();
  EXPECT_EQ(bytes.extra(), 0);
  // The output is dropped without a backward.
  activation_checkpoint(fn, x);
  EXPECT_EQ(bytes.extra(), 0);
}

// A custom function that unpacks its saved tensors twice.
struct AsksTwice : torch::autograd::Function<AsksTwice> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const Tensor y = x.exp();
    context->save_for_backward({x, y});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const Tensor y = context->get_saved_variables()[1];
    const Tensor x = context->get_saved_variables()[0];
    return {gradients[0] * y + 0 * x};
  }
};

TEST(ActivationCheckpoint, ACustomFunctionMayUnpackTwice) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  const auto fn = [](const Tensor& in) { return AsksTwice::apply(in.sin()).cos(); };
  expect_same_bits(derive({x}, [&] { return fn(x).sum(); }),
                   derive({x}, [&] { return activation_checkpoint(fn, x).sum(); }));
}

TEST(ActivationCheckpoint, SharedRecomputeServesDisjointBackwards) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  const auto fn = [](const Tensor& in) { return std::make_pair(in.sin().sin(), in.cos().cos()); };
  const auto run = [&](bool shared) {
    x.mutable_grad() = Tensor();
    auto [u, v] = activation_checkpoint(fn, x);
    const Recomputes counted;
    {
      std::optional<SharedRecompute> guard;
      if (shared) {
        guard.emplace();
      }
      u.sum().backward({}, /*retain_graph=*/true);
      v.sum().backward();
    }
    return std::make_pair(counted.count(), x.grad().clone());
  };
  const auto apart = run(false);
  const auto shared = run(true);
  EXPECT_EQ(apart.first, 2);
  EXPECT_EQ(shared.first, 1);
  EXPECT_TRUE(torch::equal(apart.second, shared.second));
  // Two backwards: from the end to the middle, and from the middle to the start.
  const auto staged = [&](bool share) {
    auto [middle, last] = activation_checkpoint(
        [](const Tensor& in) {
          const Tensor y = in.sin().cos();
          return std::make_pair(y, y.sin().cos());
        },
        x);
    const Recomputes counted;
    std::optional<SharedRecompute> guard;
    if (share) {
      guard.emplace();
    }
    const Tensor ones = on_device::ones({4});
    const Tensor g = torch::autograd::grad({last}, {middle}, {ones})[0];
    const Tensor all = torch::autograd::grad({middle}, {x}, {g})[0];
    return std::make_pair(all, counted.count());
  };
  EXPECT_EQ(staged(false).second, 2);
  EXPECT_EQ(staged(true).second, 1);
  EXPECT_TRUE(torch::equal(staged(false).first, staged(true).first));
  // The same part twice. It is recomputed twice.
  const Tensor twice =
      activation_checkpoint([](const Tensor& in) { return in.sin().cos(); }, x).sum();
  const Recomputes counted;
  const SharedRecompute guard;
  const Tensor once = torch::autograd::grad({twice}, {x}, {}, true)[0];
  EXPECT_TRUE(torch::equal(once, torch::autograd::grad({twice}, {x})[0]));
  EXPECT_EQ(counted.count(), 2);
}

TEST(ActivationCheckpointSequential, KeepsTheLastSegment) {
  auto blocks = make_mlps(7);
  std::vector<std::function<Tensor(Tensor)>> functions;
  for (Mlp& block : blocks) {
    functions.emplace_back([block](Tensor in) mutable { return block->forward(std::move(in)); });
  }
  const Tensor x = on_device::randn({4, 8}).requires_grad_();
  auto leaves = parameters_of(blocks);
  leaves.push_back(x);
  const Derived plain = derive(leaves, [&] {
    Tensor y = x;
    for (Mlp& block : blocks) {
      y = block->forward(y);
    }
    return y.sum();
  });
  for (int64_t segments : {1, 3, 7}) {
    for (Mlp& block : blocks) {
      block->calls = 0;
    }
    expect_same_bits(plain, derive(leaves, [&] {
                       return activation_checkpoint_sequential(functions, segments, x).sum();
                     }));
    int calls = 0;
    for (Mlp& block : blocks) {
      calls += block->calls;
    }
    EXPECT_EQ(calls, 7 + (segments - 1) * (7 / segments)) << segments;
  }
  EXPECT_THROW(activation_checkpoint_sequential(functions, 0, x), InputError);
  EXPECT_THROW(activation_checkpoint_sequential(functions, 8, x), InputError);
}

} // namespace hasten::checkpoint_test
