#include "hasten/core/linear.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/core/autocast.h"
#include "hasten/core/gradient_place.h"
#include "hasten/core/memory.h"

namespace hasten {

static double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  const double size = at::linalg_vector_norm(b).item<double>();
  const double distance = at::linalg_vector_norm(a.to(at::kDouble) - b).item<double>();
  return size > 0 ? distance / size : distance;
}

// torch's result in fp64: output, and gradients of the sum of its squares.
struct LinearReference {
  at::Tensor output, x, weight, bias;

  LinearReference(const at::Tensor& x32, const at::Tensor& weight32, const at::Tensor& bias32)
      : x(x32.detach().to(at::kDouble).requires_grad_()),
        weight(weight32.detach().to(at::kDouble).requires_grad_()),
        bias(bias32.detach().to(at::kDouble).requires_grad_()) {
    output = torch::nn::functional::linear(x, weight, bias);
    output.pow(2).sum().backward();
  }
};

struct LinearCase {
  std::vector<int64_t> rows;
  int64_t in, out;
};

class LinearShapes : public testing::TestWithParam<LinearCase> {};

TEST_P(LinearShapes, OutputAndGradientsEqualTorchsInDouble) {
  torch::manual_seed(1);
  std::vector<int64_t> shape = GetParam().rows;
  shape.push_back(GetParam().in);
  auto x = torch::randn(shape).requires_grad_();
  auto weight = torch::randn({GetParam().out, GetParam().in}).requires_grad_();
  auto bias = torch::randn({GetParam().out}).requires_grad_();
  const LinearReference reference(x, weight, bias);

  const at::Tensor output = fast_linear(x, weight, bias);
  output.pow(2).sum().backward();

  EXPECT_EQ(output.sizes(), reference.output.sizes());
  EXPECT_LT(relative_difference(output, reference.output), 2e-6);
  EXPECT_LT(relative_difference(x.grad(), reference.x.grad()), 2e-6);
  EXPECT_LT(relative_difference(weight.grad(), reference.weight.grad()), 2e-6);
  EXPECT_LT(relative_difference(bias.grad(), reference.bias.grad()), 2e-6);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(fast_linear(x, weight, bias).equal(output));
}

INSTANTIATE_TEST_SUITE_P(All, LinearShapes,
                         testing::Values(LinearCase{{3}, 5, 7}, LinearCase{{64}, 32, 48},
                                         LinearCase{{1, 1}, 64, 64}, LinearCase{{4, 33}, 64, 96},
                                         LinearCase{{1000}, 64, 96}, LinearCase{{1151}, 32, 64},
                                         LinearCase{{31}, 64, 96}, LinearCase{{2, 3, 17}, 128, 32},
                                         LinearCase{{0}, 32, 32}, LinearCase{{20}, 32, 2}));

TEST(Linear, HasTorchsBitsWhereItsProductsAreTorchs) {
  if (linear_uses_onednn()) {
    GTEST_SKIP() << "this CPU's products are oneDNN's";
  }
  torch::manual_seed(7);
  const at::Tensor values = torch::randn({3, 40, 96});
  const at::Tensor weights[] = {torch::randn({64, 96}), torch::randn({64})};
  for (const bool biased : {true, false}) {
    const auto results = [&](bool fast) {
      const at::Tensor x = values.clone().requires_grad_();
      const at::Tensor weight = weights[0].clone().requires_grad_();
      const at::Tensor bias = biased ? weights[1].clone().requires_grad_() : at::Tensor();
      const at::Tensor y = fast     ? fast_linear(x, weight, bias)
                           : biased ? at::linear(x, weight, bias)
                                    : at::linear(x, weight);
      y.pow(2).sum().backward();
      return std::vector<at::Tensor>{y.detach(), x.grad(), weight.grad()};
    };
    const auto ours = results(true), torchs = results(false);
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(ours[i].equal(torchs[i])) << biased << " result " << i;
    }
  }
}

TEST(Linear, TakesStridedInputAndNoBias) {
  torch::manual_seed(2);
  const auto x = torch::randn({64, 40}).t(); // [40, 64]
  const auto weight = torch::randn({64, 32}).t(); // [32, 64]
  const auto expected = x.to(at::kDouble).matmul(weight.to(at::kDouble).t());
  EXPECT_LT(relative_difference(fast_linear(x, weight), expected), 2e-6);
}

TEST(Linear, LeavesOutGradientsNobodyAsksFor) {
  const auto x = torch::randn({32, 32});
  const auto weight = torch::randn({32, 32});
  auto bias = torch::zeros({32}).requires_grad_();
  fast_linear(x, weight, bias).sum().backward();
  EXPECT_TRUE(bias.grad().equal(torch::full({32}, 32.0f)));
  EXPECT_FALSE(weight.grad().defined());
}

TEST(Linear, CanBeDifferentiatedTwice) {
  torch::manual_seed(3);
  auto x = torch::randn({32, 32}).requires_grad_();
  auto weight = torch::randn({32, 32}).requires_grad_();
  // Of the norm of all gradients, whose graph goes through x and weight in each of them.
  const auto second = [&](const at::Tensor& output) {
    const auto first =
        torch::autograd::grad({output.to(at::kFloat).pow(2).sum()}, {x, weight}, {}, true, true);
    return torch::autograd::grad({first[0].pow(2).sum() + first[1].pow(2).sum()}, {x, weight});
  };
  for (const bool bf16 : {false, true}) {
    const Autocast autocast({.enabled = bf16});
    for (const char* name : {"", "gelu"}) {
      const Activation activation{name};
      const auto ours = second(fast_linear(activation, x, weight));
      const auto torchs = second(torch::nn::functional::linear(activation(x), weight));
      for (const size_t i : {0, 1}) {
        EXPECT_LT(relative_difference(ours[i], torchs[i].to(at::kDouble)), bf16 ? 3e-2 : 1e-5)
            << name << i;
      }
    }
  }
}

// The peak of a block's backward: x and its gradient are not in memory at the same time.
TEST(Linear, BackwardLetsGoOfItsInputBeforeItMakesTheInputsGradient) {
  install_memory_meter();
  auto row = torch::randn({1, 1024}).requires_grad_();
  auto weight = torch::randn({128, 1024}).requires_grad_();
  constexpr int64_t kInput = 256 * 1024 * 4;
  constexpr int64_t kWeight = 128 * 1024 * 4;
  constexpr int64_t kOutput = 256 * 128 * 4;
  for (const bool retain : {false, true}) {
    // Only the product keeps the clone. Its backward allocates nothing large.
    const at::Tensor loss = fast_linear(row.expand({256, 1024}).clone(), weight).sum();
    const int64_t before = memory_stats().live_bytes;
    reset_peak_memory();
    loss.backward({}, retain);
    const int64_t peak = memory_stats().peak_bytes - before;
    // If the graph is not retained, the input is freed before its gradient is computed.
    EXPECT_EQ(peak < kWeight + kOutput + kInput / 2, !retain) << peak;
  }
}

// Values and gradients are those of the two calls, bit for bit, in fp32 and under autocast.
TEST(Linear, AnActivationComputedAgainGivesTheBitsOfOneThatIsSaved) {
  torch::manual_seed(5);
  for (const char* name : {"gelu", "gelu_new", "relu", "silu", "tanh"}) {
    for (const bool gated : {false, true}) {
      for (const bool narrow : {false, true}) {
        const Autocast autocast({.enabled = narrow});
        const Activation activation{name, gated};
        const at::Tensor values =
            torch::randn({3, 40, gated ? 128 : 64}).to(narrow ? at::kBFloat16 : at::kFloat);
        const at::Tensor weights[] = {torch::randn({32, 64}), torch::randn({32})};
        const auto results = [&](bool one_call) {
          const at::Tensor x = values.clone().requires_grad_();
          const at::Tensor weight = weights[0].clone().requires_grad_();
          const at::Tensor bias = weights[1].clone().requires_grad_();
          const at::Tensor y = one_call ? fast_linear(activation, x, weight, bias)
                                        : fast_linear(activation(x), weight, bias);
          y.pow(2).sum().backward();
          return std::vector<at::Tensor>{y.detach(), x.grad(), weight.grad(), bias.grad()};
        };
        const auto one = results(true);
        const auto two = results(false);
        for (size_t i = 0; i < one.size(); ++i) {
          EXPECT_TRUE(one[i].equal(two[i])) << name << gated << narrow << " result " << i;
        }
      }
    }
  }
}

TEST(Linear, AnActivationIsNotKeptForBackward) {
  install_memory_meter();
  const auto row = torch::randn({1, 1024}).requires_grad_();
  const auto weight = torch::randn({16, 1024}).requires_grad_();
  const int64_t before = memory_stats().live_bytes;
  const at::Tensor y = fast_linear({"gelu"}, row.expand({256, 1024}).clone(), weight);
  const int64_t kept = memory_stats().live_bytes - before;
  EXPECT_LT(kept, 256 * 1024 * 4 * 5 / 4); // x and the result
}

// A backward makes a weight's gradient where it is kept. A second use of the weight, and gradients
// that the caller gets, are elsewhere.
TEST(Linear, AWeightsGradientIsMadeInItsPlace) {
  torch::manual_seed(6);
  const at::Tensor x = torch::randn({40, 32});
  const at::Tensor weight = torch::randn({32, 32}).requires_grad_();
  const at::Tensor memory = torch::full({32, 32}, 7.0f);
  int64_t asked = 0;
  const detail::GradientPlaceScope scope([&](const at::Tensor& parameter) {
    EXPECT_TRUE(parameter.is_same(weight));
    return asked++ == 0 ? memory.view({32, 32}) : at::Tensor();
  });
  const auto loss = [&](int uses) {
    at::Tensor y = x;
    for (int use = 0; use < uses; ++use) {
      y = fast_linear(y, weight);
    }
    return y.pow(2).sum();
  };
  for (const int uses : {1, 2}) {
    const at::Tensor expected = torch::autograd::grad({loss(uses)}, {weight})[0];
    EXPECT_EQ(asked, 0);
    EXPECT_NE(expected.const_data_ptr(), memory.const_data_ptr());
    loss(uses).backward();
    EXPECT_EQ(asked, uses);
    EXPECT_TRUE(weight.grad().equal(expected)) << uses;
    EXPECT_EQ(weight.grad().const_data_ptr() == memory.const_data_ptr(), uses == 1);
    weight.mutable_grad() = at::Tensor();
    asked = 0;
  }
}

TEST(Linear, AGradientOf16BitsIsSummedIn32) {
  torch::manual_seed(8);
  const Autocast autocast({.enabled = true});
  const at::Tensor x = torch::randn({4000, 32});
  const at::Tensor weight = torch::randn({32, 32}).to(at::kBFloat16).requires_grad_();
  const detail::GradientPlaceScope scope(
      [](const at::Tensor& parameter) { return torch::empty_like(parameter); });
  const auto loss = [&] { return fast_linear(x, weight).to(at::kFloat).pow(2).sum(); };
  const at::Tensor expected = torch::autograd::grad({loss()}, {weight})[0]; // has no place
  loss().backward();
  EXPECT_TRUE(weight.grad().equal(expected));
}

// What was there before counts only if the product is added to it, also where there are no rows.
TEST(Linear, AProductOverRowsReplacesAResultOrIsAddedToIt) {
  torch::manual_seed(9);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t rows : {0, 7, 300}) {
      const at::Tensor a = torch::randn({rows, 32}).to(dtype);
      const at::Tensor b = torch::randn({rows, 48}).to(dtype);
      const at::Tensor out = torch::full({32, 48}, std::nanf(""));
      product_over_rows(a, b, out, false);
      const at::Tensor product = at::mm(a.t().to(at::kFloat), b.to(at::kFloat));
      const double tolerance = dtype == at::kBFloat16 ? 0.3 : 1e-3;
      EXPECT_TRUE(out.allclose(product, 0, tolerance)) << dtype << rows;
      const at::Tensor before = out.clone();
      product_over_rows(a, b, out, true);
      EXPECT_TRUE(out.allclose(before + before, 0, tolerance)) << dtype << rows;
    }
  }
}

TEST(Linear, AWeightChangedBeforeBackwardIsAnError) {
  auto x = torch::randn({32, 32}).requires_grad_();
  auto weight = torch::randn({32, 32}).requires_grad_();
  const auto output = fast_linear(x, weight);
  {
    const torch::NoGradGuard no_grad;
    weight.add_(1);
  }
  EXPECT_THROW(output.sum().backward(), c10::Error);
}

TEST(Linear, OtherDtypesAreTorchsOwn) {
  const auto x = torch::randn({32, 32}, at::kDouble);
  const auto weight = torch::randn({32, 32}, at::kDouble);
  EXPECT_TRUE(fast_linear(x, weight).equal(torch::nn::functional::linear(x, weight)));
}

} // namespace hasten
