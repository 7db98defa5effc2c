// Operator policies: which operators run again, and correct values.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "activation_checkpoint/region_rig.h"
#include "hasten/activation_checkpoint/op_policy.h"
#include "hasten/core/linear.h"
#include "support/on_device.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

// Bytes that remain in memory after a region's forward, without its loss.
static int64_t bytes_after_forward(const std::function<Tensor(const Tensor&)>& fn, const Tensor& x,
                                   std::shared_ptr<const OpPolicy> policy, Tensor* output) {
  *output = Tensor();
  const LiveBytes bytes;
  *output = activation_checkpoint(fn, x, Options{.policy = std::move(policy)}).sum();
  return bytes.extra() - 4; // the sum
}

TEST(OpPolicy, KeepsTheProductAndRecomputesTheRest) {
  const Tensor x = on_device::randn({32, 16}).requires_grad_();
  const Tensor w = on_device::randn({16, 32}).requires_grad_();
  std::vector<const void*> products;
  const auto fn = [&](const Tensor& in) {
    const Tensor product = in.cos().mm(w);
    products.push_back(product.const_data_ptr());
    return product.sin();
  };
  const auto run = [&](std::shared_ptr<const OpPolicy> policy) {
    return derive({x, w},
                  [&] { return activation_checkpoint(fn, x, Options{.policy = policy}).sum(); });
  };
  const Derived plain = derive({x, w}, [&] { return fn(x).sum(); });
  expect_same_bits(plain, run(nullptr));
  products.clear();
  expect_same_bits(plain, run(OpPolicy::keep_expensive()));
  ASSERT_EQ(products.size(), 2);
  EXPECT_EQ(products[0], products[1]) << "handed out, not made again";
  Tensor y;
  // The region's output of 32 * 32 floats always stays; the kept product has the same size.
  const int64_t none = bytes_after_forward(fn, x, nullptr, &y);
  EXPECT_EQ(bytes_after_forward(fn, x, OpPolicy::keep_expensive(), &y) - none, 32 * 32 * 4);
  EXPECT_EQ(bytes_after_forward(fn, x, OpPolicy::keep({"aten::cos", "aten::mm"}), &y) - none,
            32 * 32 * 4 + 32 * 16 * 4);
  int asked = 0;
  const auto decide = [&](const OpCall& call) {
    ++asked;
    return call.name == "aten::mm" && call.index == 0 && call.bytes == 32 * 32 * 4;
  };
  bytes_after_forward(fn, x, OpPolicy::keep_if(decide), &y);
  const int in_forward = asked;
  y.backward();
  EXPECT_EQ(asked, in_forward) << "asked in forward only";
}

// linear() of 3-d inputs is mm and an in-place addition to its result.
TEST(OpPolicy, AProductThatABiasIsAddedToIsNotAddedTwice) {
  torch::manual_seed(2);
  auto a = on_device::moved(torch::nn::Linear(8, 16));
  auto b = on_device::moved(torch::nn::Linear(16, 8));
  const Tensor x = on_device::randn({16, 8, 8}).requires_grad_();
  const auto fn = [&](const Tensor& in) { return b(at::gelu(a(in))).exp(); };
  std::vector<Tensor> leaves = a->parameters();
  for (const Tensor& parameter : b->parameters()) {
    leaves.push_back(parameter);
  }
  leaves.push_back(x);
  const Derived plain = derive(leaves, [&] { return fn(x).sum(); });
  for (const bool retain : {false, true}) {
    expect_same_bits(plain, derive(leaves, [&] {
                       const Tensor y = activation_checkpoint(
                           fn, x, Options{.policy = OpPolicy::keep_expensive()});
                       if (retain) {
                         torch::autograd::grad({y.sum()}, {x}, {}, true);
                       }
                       return y.sum();
                     }));
  }
  // The product's bytes show that it is kept.
  Tensor y;
  EXPECT_EQ(bytes_after_forward(fn, x, OpPolicy::keep_expensive(), &y) -
                bytes_after_forward(fn, x, nullptr, &y),
            128 * (16 + 8) * 4);
}

// No tensor is saved after this product, so the recomputation stops before it.
TEST(OpPolicy, AProductThatNothingNeedsIsNotKept) {
  torch::manual_seed(3);
  auto a = on_device::moved(torch::nn::Linear(8, 16));
  auto b = on_device::moved(torch::nn::Linear(16, 8));
  const Tensor x = on_device::randn({128, 8}).requires_grad_();
  const auto fn = [&](const Tensor& in) { return in + b(at::gelu(a(in))); };
  const auto run = [&](bool early_stop) {
    return derive({x, a->weight, b->weight}, [&] {
      return activation_checkpoint(
                 fn, x, Options{.early_stop = early_stop, .policy = OpPolicy::keep_expensive()})
          .sum();
    });
  };
  const Derived plain = derive({x, a->weight, b->weight}, [&] { return fn(x).sum(); });
  expect_same_bits(plain, run(true));
  expect_same_bits(plain, run(false));
  Tensor y;
  EXPECT_EQ(bytes_after_forward(fn, x, OpPolicy::keep_expensive(), &y) -
                bytes_after_forward(fn, x, nullptr, &y),
            128 * 16 * 4);
}

TEST(OpPolicy, AKeptValueChangedLaterIsRecomputed) {
  const Tensor x = on_device::randn({4, 4}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    Tensor product = in.mm(in);
    const Tensor read = product + 1; // reads it before it is changed
    product.mul_(2);
    Tensor part = in.mm(in);
    part.select(0, 0).mul_(3); // only a part
    return read * product.cos() + part.exp();
  };
  expect_same_bits(
      derive({x}, [&] { return fn(x).sum(); }), derive({x}, [&] {
        return activation_checkpoint(fn, x, Options{.policy = OpPolicy::keep_expensive()}).sum();
      }));
  // A change after the region cannot be replayed: an error.
  auto [y, sine] = activation_checkpoint(
      [](const Tensor& in) {
        const Tensor product = in.exp().mm(in);
        return std::make_pair(product, product.sin());
      },
      x, Options{.policy = OpPolicy::keep_expensive()});
  y.mul_(2);
  expect_says(error_of<std::exception>([&, loss = sine.sum()] { loss.backward(); }),
              {"aten::mm", "changed in place after its region"});
}

TEST(OpPolicy, FastLinearIsAnExpensiveOperator) {
  const Tensor x = on_device::randn({64, 32}).requires_grad_();
  const Tensor w = on_device::randn({48, 32}).requires_grad_();
  const auto fn = [&](const Tensor& in) { return fast_linear(in, w).relu(); };
  Tensor y;
  EXPECT_EQ(bytes_after_forward(fn, x, OpPolicy::keep_expensive(), &y) -
                bytes_after_forward(fn, x, nullptr, &y),
            64 * 48 * 4);
  expect_same_bits(
      derive({x, w}, [&] { return fn(x).sum(); }), derive({x, w}, [&] {
        return activation_checkpoint(fn, x, Options{.policy = OpPolicy::keep_expensive()}).sum();
      }));
}

TEST(OpPolicy, AnOperatorThatDrawsMayBeKept) {
  const Tensor x = on_device::randn({128}).requires_grad_();
  // In statements: the order of drawing within one expression is the compiler's choice.
  const auto fn = [](const Tensor& in) {
    const Tensor kept = at::bernoulli(on_device::full({128}, 0.5));
    const Tensor drawn_after = on_device::rand({128});
    return (in.exp() * kept).sin() * drawn_after;
  };
  expect_same_bits(derive({x}, [&] { return fn(x).sum(); }), derive({x}, [&] {
                     return activation_checkpoint(
                                fn, x, Options{.policy = OpPolicy::keep({"aten::bernoulli"})})
                         .sum();
                   }));
  Tensor y;
  EXPECT_EQ(bytes_after_forward(fn, x, OpPolicy::keep({"aten::bernoulli"}), &y) -
                bytes_after_forward(fn, x, nullptr, &y),
            128 * 4);
}

// Two outputs, two backward calls: the first one uses up the kept results.
TEST(OpPolicy, ASecondBackwardNeedsARetainedGraph) {
  const Tensor x = on_device::randn({4, 4}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    const Tensor product = in.mm(in);
    return std::make_pair(product.sin(), product.cos());
  };
  for (const bool retain : {true, false}) {
    auto [u, v] = activation_checkpoint(fn, x, Options{.policy = OpPolicy::keep_expensive()});
    u.sum().backward({}, retain);
    const std::string error = error_of<std::exception>([&] { v.sum().backward(); });
    EXPECT_EQ(error.empty(), retain) << error;
    if (!retain) {
      expect_says(error, {"second backward", "aten::mm", "retain"});
    }
  }
}

TEST(OpPolicy, ManyResultsAndNestedRegionsInEveryCombination) {
  auto blocks = make_mlps(2);
  const Tensor x = on_device::randn({4, 8}).requires_grad_();
  auto leaves = parameters_of(blocks);
  leaves.push_back(x);
  const auto child = [&](const Tensor& in) {
    const auto [values, indices] = at::topk(blocks[0]->forward(in), 8);
    const auto normed = at::native_layer_norm(values, {8}, {}, {}, 1e-5);
    return std::get<0>(normed).exp() * indices;
  };
  const auto everything = OpPolicy::keep_if([](const OpCall&) { return true; });
  const std::vector<std::shared_ptr<const OpPolicy>> policies{nullptr, OpPolicy::keep_expensive(),
                                                              everything};
  const Derived plain = derive(leaves, [&] { return blocks[1]->forward(child(x)).square().sum(); });
  for (const auto& outer : policies) {
    for (const auto& inner : policies) {
      expect_same_bits(plain, derive(leaves, [&] {
                         return activation_checkpoint(
                                    [&](const Tensor& in) {
                                      return blocks[1]->forward(activation_checkpoint(
                                          child, in, Options{.policy = inner}));
                                    },
                                    x, Options{.policy = outer})
                             .square()
                             .sum();
                       }));
    }
  }
}

TEST(OpPolicy, AnOperatorThatForwardDidNotCallIsNamed) {
  const Tensor x = on_device::randn({4, 4}).requires_grad_();
  int calls = 0;
  const auto fn = [&](const Tensor& in) {
    const Tensor y = calls++ == 0 ? in.exp() : in.exp().tan();
    return y.mm(in).sin();
  };
  const Tensor y = activation_checkpoint(fn, x, Options{.policy = OpPolicy::keep_expensive()});
  expect_says(error_of<std::exception>([&] { y.sum().backward(); }), {"aten::tan", "0 times"});
  expect_says(error_of<std::exception>([] { OpPolicy::keep({"mm"}); }),
              {"operator=mm", "aten::mm"});
  expect_says(error_of<std::exception>([] { OpPolicy::keep_if({}); }), {"decide"});
}

TEST(OpPolicy, KeptResultsGoWithTheGraphOrWithItsBackward) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const Options options{.policy = OpPolicy::keep({"aten::exp"})};
  const auto fn = [](const Tensor& in) {
    const Tensor kept = in.cos().exp();
    return std::make_pair(kept.sin(), kept.tanh());
  };
  const LiveBytes bytes;
  constexpr int64_t kOne = 4096;
  {
    auto [sine, tanh] = activation_checkpoint(fn, x, options);
    EXPECT_EQ(bytes.extra(), 3 * kOne);
  }
  EXPECT_EQ(bytes.extra(), 0) << "dropped without a backward";
  auto [sine, tanh] = activation_checkpoint(fn, x, options);
  sine.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(bytes.extra(), 3 * kOne);
  sine.sum().backward();
  EXPECT_EQ(bytes.extra(), 2 * kOne) << "the outputs";
  expect_says(error_of<std::exception>([&] { tanh.sum().backward(); }),
              {"a second backward", "aten::exp", "retain"});
  sine = tanh = Tensor();
  EXPECT_EQ(bytes.extra(), 0);
}

// The outer region does not keep an inner region's kept results. Its recomputation computes them.
TEST(OpPolicy, InsideAnotherRegionResultsAreKeptInItsRecomputationAlone) {
  const Tensor x = on_device::randn({1024}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  int products = 0;
  const auto inner = [&](const Tensor& in) {
    Tensor kept = in.cos().mul(3);
    kept.add_(1); // part of the kept value
    ++products;
    return kept.sin().tanh();
  };
  const auto outer = [&](const Tensor& in) {
    return activation_checkpoint(inner, in.sin(), Options{.policy = OpPolicy::keep({"aten::mul"})})
        .cos();
  };
  const Derived plain =
      derive({x}, [&] { return (x.sin().cos().mul(3) + 1).sin().tanh().cos().sum(); });
  expect_same_bits(plain, derive({x}, [&] { return activation_checkpoint(outer, x).sum(); }));
  x.mutable_grad() = torch::zeros_like(x);
  const LiveBytes before;
  const Tensor number = on_device::ones({});
  const int64_t of_a_number = before.extra(); // allocators of devices round up
  const LiveBytes bytes;
  products = 0;
  Tensor y = activation_checkpoint(outer, x).sum();
  EXPECT_EQ(bytes.extra(), of_a_number) << "the sum alone";
  y.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(products, 3) << "in forward, in the outer's and in its own";
  EXPECT_EQ(bytes.extra(), of_a_number);
  y.backward();
  EXPECT_EQ(products, 5);
  EXPECT_EQ(bytes.extra(), of_a_number);
  EXPECT_TRUE(torch::equal(x.grad(), 2 * plain.gradients[0]));
}

TEST(OpPolicy, ViewsOfIntegersAreNoObstacle) {
  const Tensor numbers = on_device::arange(6).view({2, 3});
  const Tensor x = on_device::randn({3}).requires_grad_();
  const auto fn = [](const Tensor& a, const Tensor& b) {
    return std::make_pair(a.view({-1}), b.sin().cos());
  };
  expect_same_bits(derive({x}, [&] { return fn(numbers, x).second.sum(); }), derive({x}, [&] {
                     auto [flat, y] = activation_checkpoint(
                         fn, numbers, x,
                         Options{.policy = OpPolicy::keep({"aten::view", "aten::sin"})});
                     EXPECT_TRUE(torch::equal(flat, on_device::arange(6)));
                     return y.sum();
                   }));
}

// A custom operator with a result that is not a tensor.
static int sines = 0;
static std::tuple<Tensor, int64_t> sine_and_number(const Tensor& x) {
  ++sines;
  return {x.sin(), 2};
}
TORCH_LIBRARY_FRAGMENT(hasten_test, library) {
  library.def("sine_and_number(Tensor x) -> (Tensor, int)");
  library.impl("sine_and_number", c10::DispatchKey::CompositeExplicitAutograd, &sine_and_number);
}
struct SineAndNumber : torch::autograd::Function<SineAndNumber> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    static const auto handle = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("hasten_test::sine_and_number", "")
                                   .typed<std::tuple<Tensor, int64_t>(const Tensor&)>();
    context->save_for_backward({x});
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [y, number] = handle.call(x);
    EXPECT_EQ(number, 2);
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0].cos()};
  }
};

TEST(OpPolicy, ResultsThatAreNoTensorsAreKeptToo) {
  const Tensor x = on_device::randn({3}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    return (SineAndNumber::apply(in) * in.sin().exp()).sin();
  };
  const Derived plain = derive({x}, [&] { return fn(x).sum(); });
  for (const bool kept : {true, false}) {
    sines = 0;
    expect_same_bits(
        plain, derive({x}, [&] {
          return activation_checkpoint(
                     fn, x,
                     Options{.policy =
                                 kept ? OpPolicy::keep({"hasten_test::sine_and_number"}) : nullptr})
              .sum();
        }));
    EXPECT_EQ(sines, kept ? 1 : 2);
  }
}

static int reductions = 0;
static Tensor fake_reduction(const Tensor& x) {
  ++reductions;
  return x * 2;
}
static void fake_reduction_in_place(const Tensor&) {}
TORCH_LIBRARY_FRAGMENT(_c10d_functional, library) {
  library.def("hasten_test_reduce(Tensor x) -> Tensor");
  library.impl("hasten_test_reduce", c10::DispatchKey::CompositeExplicitAutograd, &fake_reduction);
  library.def("hasten_test_reduce_(Tensor(a!) x) -> ()");
  library.impl("hasten_test_reduce_", c10::DispatchKey::CompositeExplicitAutograd,
               &fake_reduction_in_place);
}
static Tensor call_reduction(const Tensor& x) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("_c10d_functional::hasten_test_reduce", "")
                                 .typed<Tensor(const Tensor&)>();
  return handle.call(x.detach());
}

TEST(OpPolicy, ACollectiveIsNeverRunAgain) {
  const Tensor x = on_device::randn({4}).requires_grad_();
  const auto fn = [](const Tensor& in) { return in.exp().sin() * call_reduction(in); };
  const Derived plain = derive({x}, [&] { return fn(x).sum(); });
  reductions = 0;
  expect_same_bits(
      plain, derive({x}, [&] {
        return activation_checkpoint(fn, x, Options{.policy = OpPolicy::keep({})}).sum();
      }));
  EXPECT_EQ(reductions, 1);
}

TEST(OpPolicy, ByCostKeepsTheMostTimeForEachByte) {
  const std::vector<OpCost> costs{{"aten::mm", 0, 100, 1.0},
                                  {"aten::exp", 0, 100, 0.1},
                                  {"aten::mm", 1, 1000, 5.0},
                                  {"aten::sum", 0, 4, 0.01},
                                  {"aten::view", 0, 0, 1.0}};
  const auto policy = OpPolicy::keep_by_cost(costs, 210);
  EXPECT_TRUE(policy->keeps({"aten::mm", 0, 0}));
  EXPECT_FALSE(policy->keeps({"aten::mm", 1, 0})) << "does not fit";
  EXPECT_TRUE(policy->keeps({"aten::sum", 0, 0}));
  EXPECT_TRUE(policy->keeps({"aten::exp", 0, 0}));
  EXPECT_FALSE(policy->keeps({"aten::view", 0, 0}));
  // measure_ops measures the operators that a forward calls. It does not change the random state.
  auto blocks = make_mlps(1, 64);
  const Tensor x = on_device::randn({256, 64});
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  const auto measured = measure_ops([&] { blocks[0]->forward(x); });
  EXPECT_TRUE(torch::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
  double products = 0;
  double all = 0;
  int64_t bytes = 0;
  for (const OpCost& cost : measured) {
    all += cost.seconds;
    if (cost.name == "aten::addmm") {
      products += cost.seconds;
      bytes += cost.bytes;
    }
  }
  EXPECT_EQ(bytes, 256 * (128 + 64) * 4);
  EXPECT_GT(products, 0);
  EXPECT_LE(products, all);
}

} // namespace hasten::checkpoint_test
