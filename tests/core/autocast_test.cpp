// Autocast: conversions, restored settings, threads, and linear layers.
#include "hasten/core/autocast.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/core/linear.h"
#include "hasten/core/op_scope.h"
#include "hasten/core/precision_probe.h"

namespace hasten {

static torch::Tensor product() { return torch::mm(torch::ones({4, 4}), torch::ones({4, 4})); }

static torch::ScalarType product_type() { return product().scalar_type(); }

TEST(Autocast, ScopesNestOnAndOffAndEndWithWhatWasThere) {
  EXPECT_EQ(product_type(), torch::kFloat);
  {
    const Autocast bf16;
    EXPECT_EQ(product_type(), torch::kBFloat16);
    {
      const Autocast off({.enabled = false});
      EXPECT_EQ(product_type(), torch::kFloat);
      {
        const Autocast fp16({.dtype = torch::kHalf});
        EXPECT_EQ(product_type(), torch::kHalf);
      }
      EXPECT_EQ(product_type(), torch::kFloat);
    }
    EXPECT_EQ(product_type(), torch::kBFloat16);
    EXPECT_EQ(autocast_dtype(), torch::kBFloat16);
  }
  EXPECT_EQ(product_type(), torch::kFloat);
  EXPECT_FALSE(autocast_dtype().has_value());
}

TEST(Autocast, AnExceptionPutsBackTooAndDropsConvertedWeights) {
  const auto weight = torch::ones({4, 4}, torch::requires_grad());
  const auto result = [&] { return torch::mm(torch::ones({4, 4}), weight).sum().item<double>(); };
  EXPECT_THROW(
      {
        const Autocast outer;
        const Autocast inner({.dtype = torch::kHalf});
        EXPECT_EQ(result(), 64);
        throw std::runtime_error("in the middle");
      },
      std::runtime_error);
  EXPECT_EQ(product_type(), torch::kFloat);
  {
    const torch::NoGradGuard no_grad;
    weight.fill_(2);
  }
  const Autocast again({.dtype = torch::kHalf});
  EXPECT_EQ(result(), 128); // the cast of the scope that has ended is gone
}

TEST(Autocast, DroppedCastsSeeAWeightThatChangedInTheScope) {
  const Autocast autocast;
  const auto weight = torch::ones({4, 4}, torch::requires_grad());
  const auto result = [&] { return torch::mm(torch::ones({4, 4}), weight).sum().item<double>(); };
  EXPECT_EQ(result(), 64);
  {
    const torch::NoGradGuard no_grad;
    weight.fill_(2);
  }
  EXPECT_EQ(result(), 64); // torch's cache has the old value; see the header's warning
  drop_autocast_casts();
  EXPECT_EQ(result(), 128);
}

TEST(Autocast, RefusesADtypeThatIsNotOf16Bits) {
  try {
    const Autocast autocast({.dtype = torch::kDouble});
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("dtype=Double"), std::string::npos) << error.what();
  }
  EXPECT_EQ(product_type(), torch::kFloat);
}

TEST(Autocast, NormalisationsAndLossesAreInFp32AsOnGpus) {
  namespace F = torch::nn::functional;
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto x = torch::randn({6, 8}).to(dtype);
    const auto labels = torch::zeros({6}, torch::kLong);
    const auto types = [&] {
      return std::vector<torch::ScalarType>{torch::softmax(x, -1).scalar_type(),
                                            torch::log_softmax(x, -1).scalar_type(),
                                            torch::layer_norm(x, {8}).scalar_type(),
                                            torch::group_norm(x, 2).scalar_type(),
                                            torch::rms_norm(x, {8}).scalar_type(),
                                            x.norm().scalar_type(),
                                            x.sum().scalar_type(),
                                            x.exp().scalar_type(),
                                            x.pow(2).scalar_type(),
                                            x.logsumexp(-1).scalar_type()};
    };
    const auto losses = [&] {
      return std::vector<torch::ScalarType>{
          torch::cross_entropy_loss(x, labels).scalar_type(),
          torch::mse_loss(x, torch::zeros({6, 8})).scalar_type(),
          torch::binary_cross_entropy_with_logits(x, torch::ones({6, 8})).scalar_type()};
    };
    const std::vector<torch::ScalarType> fp32(10, torch::kFloat);
    {
      const Autocast autocast({.dtype = dtype});
      EXPECT_EQ(types(), fp32);
      EXPECT_EQ(losses(), std::vector(3, torch::kFloat));
      // The dtype argument of a call is obeyed.
      EXPECT_EQ(torch::softmax(x, -1, dtype).scalar_type(), dtype);
      {
        const Autocast off({.enabled = false});
        EXPECT_EQ(torch::softmax(x, -1).scalar_type(), dtype);
      }
    }
    const Autocast torch_list({.dtype = dtype, .fp32_ops = Fp32Ops::torch_list});
    EXPECT_EQ(types(), std::vector<torch::ScalarType>(10, dtype));
    EXPECT_EQ(losses(), std::vector(3, torch::kFloat));
  }
}

// bf16 has 8 bits: 256 + 1 is 256, and a sum of 300 ones is 256.
TEST(Autocast, SumsInFp32KeepWhat16BitsLose) {
  const auto ones = torch::ones({257}, torch::kBFloat16);
  double torchs = 0;
  {
    const Autocast autocast({.fp32_ops = Fp32Ops::torch_list});
    torchs = ones.sum().item<double>();
  }
  const Autocast autocast;
  EXPECT_EQ(ones.sum().item<double>(), 257);
  EXPECT_EQ(torchs, 256);
}

TEST(Autocast, LstmsRunInFp32WhereTheCpuHasNoneInFp16) {
  torch::nn::LSTM lstm(4, 5);
  torch::nn::Linear before(4, 4);
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    lstm->zero_grad();
    torch::Tensor output;
    {
      const Autocast autocast({.dtype = dtype});
      output = std::get<0>(lstm->forward(before(torch::ones({3, 2, 4}))));
    }
    EXPECT_EQ(output.scalar_type(), dtype == torch::kHalf ? torch::kFloat : dtype);
    output.to(torch::kFloat).sum().backward();
    for (const auto& parameter : lstm->parameters()) {
      EXPECT_TRUE(parameter.grad().isfinite().all().item<bool>());
    }
  }
}

TEST(Autocast, ThreadsBeginWithoutAndTakeASettingThatIsGiven) {
  const Autocast autocast({.dtype = torch::kHalf});
  const AutocastState here = AutocastState::now();
  EXPECT_TRUE(here.enabled());
  torch::ScalarType bare{}, given{}, softmax{}, after{};
  std::thread thread([&] {
    bare = product_type();
    {
      const Autocast same(here);
      given = product_type();
      softmax = torch::softmax(product(), -1).scalar_type();
    }
    after = product_type();
  });
  thread.join();
  EXPECT_EQ(bare, torch::kFloat);
  EXPECT_EQ(given, torch::kHalf);
  EXPECT_EQ(softmax, torch::kFloat); // hasten's operators also use the setting of the other thread
  EXPECT_EQ(after, torch::kFloat);
}

TEST(Autocast, BackwardInAnotherThreadGivesTheSameGradients) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(32, 32),
                              torch::nn::LayerNorm(std::vector<int64_t>{32}),
                              torch::nn::Linear(32, 4));
  const auto gradients = [&](bool elsewhere) {
    model->zero_grad();
    torch::Tensor loss;
    {
      const Autocast autocast;
      loss = torch::cross_entropy_loss(model->forward(torch::ones({64, 32})),
                                       torch::zeros({64}, torch::kLong));
    }
    if (elsewhere) {
      const int threads = at::get_num_threads(); // sums depend on their number
      std::thread([&] {
        at::set_num_threads(threads);
        loss.backward();
      }).join();
    } else {
      loss.backward();
    }
    std::vector<torch::Tensor> result;
    for (const auto& parameter : model->parameters()) {
      result.push_back(parameter.grad().clone());
    }
    return result;
  };
  const auto here = gradients(false);
  const auto there = gradients(true);
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_TRUE(torch::equal(here[i], there[i])) << i;
    EXPECT_EQ(here[i].scalar_type(), torch::kFloat);
  }
}

// Products of values rounded to 8 bits, summed in fp32. The reference is computed in fp32 from
// the rounded values.
TEST(Autocast, FastLinearIsTheProductOfTheRoundedNumbers) {
  torch::manual_seed(5);
  const auto rounded = [](const torch::Tensor& x) {
    return x.to(torch::kBFloat16).to(torch::kFloat);
  };
  for (const int64_t rows : {int64_t{32}, int64_t{33}, int64_t{200}, int64_t{1100}}) {
    const auto x = torch::randn({rows, 48}, torch::requires_grad());
    const auto weight = torch::randn({24, 48}, torch::requires_grad());
    const auto bias = torch::randn({24}, torch::requires_grad());
    torch::Tensor y;
    {
      const Autocast autocast;
      y = fast_linear(x, weight, bias);
    }
    ASSERT_EQ(y.scalar_type(), torch::kBFloat16);
    const auto g = rounded(torch::randn({rows, 24}));
    y.backward(g.to(torch::kBFloat16));
    const auto expect_near = [&](const torch::Tensor& mine, const torch::Tensor& reference,
                                 double units) {
      const double largest = reference.abs().max().item<double>();
      EXPECT_EQ(mine.scalar_type(), torch::kFloat);
      EXPECT_LE((mine - reference).abs().max().item<double>(), units * 0x1p-9 * largest) << rows;
    };
    expect_near(
        y.detach().to(torch::kFloat),
        torch::linear(rounded(x.detach()), rounded(weight.detach()), rounded(bias.detach())), 2.02);
    expect_near(x.grad(), g.mm(rounded(weight.detach())), 2.02);
    // The rows are split into at most five pieces, and each piece's sum is rounded once.
    expect_near(weight.grad(), g.t().mm(rounded(x.detach())), 5);
    // Elsewhere it is torch's own product, whose gradients are bf16.
    expect_near(bias.grad(), g.sum(0), linear_uses_bf16() ? 1e-3 : 2.02);
  }
}

TEST(Autocast, CastGivesWhatAProductWouldTake) {
  const auto x = torch::randn({4, 4});
  EXPECT_TRUE(autocast_cast(x).is_same(x));
  const Autocast autocast;
  const auto narrow = autocast_cast(x);
  EXPECT_EQ(narrow.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(autocast_cast(narrow).is_same(narrow));
  for (const auto dtype : {torch::kLong, torch::kDouble}) {
    EXPECT_EQ(autocast_cast(x.to(dtype)).scalar_type(), dtype);
  }
}

TEST(PrecisionProbe, ThisMachineComputesInEveryPrecisionAndSaysHowQuickly) {
  for (const auto precision : {Precision::no, Precision::bf16, Precision::fp16}) {
    EXPECT_EQ(why_no_precision(precision), "") << precision_name(precision);
  }
  const double speedup = precision_speedup(torch::kBFloat16);
  EXPECT_GT(speedup, 0.01);
  EXPECT_LT(speedup, 50);
  EXPECT_EQ(precision_speedup(torch::kBFloat16), speedup); // once per process
}

struct CountedProducts final : detail::OpObserver {
  void pass(const detail::OpPassing& passing) override {
    ours += detail::op_info(passing.op).name == "hasten::linear" ? 1 : 0;
    passing.run();
  }
  int ours = 0;
};

// A sharded model's parameters are bf16 while a block runs. Their products are split into the
// same few shapes as those of fp32 weights.
TEST(Autocast, LinearLayersOfWeightsInBf16AreMadeAsThoseInFp32) {
  if (!linear_uses_bf16()) {
    GTEST_SKIP() << "bf16 products are torch's own on this CPU";
  }
  torch::manual_seed(5);
  const auto narrow = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  const at::Tensor x = narrow(torch::randn({75, 32}));
  const at::Tensor weight = narrow(torch::randn({48, 32}));
  const at::Tensor bias = narrow(torch::randn({48}));
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> gradients;
  CountedProducts products;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x_leaf = x.detach().clone().requires_grad_();
    const at::Tensor w = weight.detach().to(type).requires_grad_();
    const at::Tensor b = bias.detach().to(type).requires_grad_();
    at::Tensor y;
    {
      const detail::OpScope scope(&products);
      const Autocast autocast;
      y = fast_linear(x_leaf, w, b);
    }
    y.to(at::kFloat).pow(2).sum().backward();
    EXPECT_EQ(w.grad().scalar_type(), type);
    EXPECT_EQ(b.grad().scalar_type(), type);
    outputs.push_back(y.detach());
    for (const at::Tensor& leaf : {x_leaf, w, b}) {
      gradients.push_back(narrow(leaf.grad()));
    }
  }
  EXPECT_EQ(products.ours, 2);
  EXPECT_TRUE(outputs[0].equal(outputs[1]));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(gradients[i].equal(gradients[i + 3]));
  }
}

} // namespace hasten
