#include "core/dropout.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace hasten {

using detail::dropout_add;

TEST(Dropout, ElementsAreKeptIndependentlyWithTheirProbability) {
  torch::manual_seed(1);
  constexpr int64_t kCount = 1'000'003; // not a multiple of the block
  for (const double p : {0.1, 0.5, 0.9}) {
    const auto y = dropout_add(torch::ones({kCount}), {}, p);
    const auto zero = (y == 0).to(torch::kDouble);
    const double rate = zero.mean().item<double>();
    const double deviation = std::sqrt(p * (1 - p) / kCount);
    EXPECT_NEAR(rate, p, 5 * deviation);
    EXPECT_NEAR(y.max().item<double>(), 1 / (1 - p), 1e-6);
    const auto a = zero - rate;
    // Elements next to each other, far apart and whole blocks apart are uncorrelated.
    for (const int64_t lag : {1, 2, 3, 16, 64, 256, 4096, 8192}) {
      const double correlation =
          (a.slice(0, 0, kCount - lag) * a.slice(0, lag)).mean().item<double>() / (p * (1 - p));
      EXPECT_NEAR(correlation, 0, 5 / std::sqrt(kCount)) << p << " " << lag;
    }
    // The masks of two calls are also uncorrelated.
    const auto b = (dropout_add(torch::ones({kCount}), {}, p) == 0).to(torch::kDouble) - rate;
    EXPECT_NEAR((a * b).mean().item<double>() / (p * (1 - p)), 0, 5 / std::sqrt(kCount));
  }
}

TEST(Dropout, BackwardUsesTheMaskOfForward) {
  torch::manual_seed(2);
  const auto x = torch::rand({7, 1000}).add_(1).requires_grad_();
  const auto residual = torch::rand({7, 1000}).requires_grad_();
  const auto y = dropout_add(x, residual, 0.25);
  const auto kept = ((y - residual).abs() > 1e-3).to(torch::kFloat) / 0.75;
  EXPECT_TRUE(torch::allclose(y, x * kept + residual));
  const auto g = torch::randn({7, 1000});
  y.backward(g);
  EXPECT_TRUE(torch::allclose(x.grad(), g * kept));
  EXPECT_TRUE(torch::equal(residual.grad(), g));
}

TEST(Dropout, SeedThreadsAndStridesDecideNothingElse) {
  const auto x = torch::rand({300, 257}).add_(1);
  const auto run = [&](const at::Tensor& input, int threads) {
    at::set_num_threads(threads);
    torch::manual_seed(3);
    return dropout_add(input, {}, 0.3);
  };
  const int before = at::get_num_threads();
  const auto one = run(x, 1);
  EXPECT_TRUE(torch::equal(one, run(x, 2)));
  EXPECT_TRUE(torch::equal(one, run(x.t().contiguous().t(), 2)));
  at::set_num_threads(before);
  // Other dtypes go to torch; p = 0 draws nothing.
  EXPECT_NEAR((dropout_add(torch::ones({100'000}, torch::kDouble), {}, 0.3) == 0)
                  .to(torch::kDouble)
                  .mean()
                  .item<double>(),
              0.3, 0.01);
  torch::manual_seed(4);
  const auto expected = torch::rand({1});
  torch::manual_seed(4);
  EXPECT_TRUE(torch::equal(dropout_add(x, {}, 0.0), x));
  EXPECT_TRUE(torch::equal(torch::rand({1}), expected));
}

} // namespace hasten
