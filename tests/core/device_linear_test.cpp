#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include "hasten/core/autocast.h"
#include "hasten/core/linear.h"
#include "support/test_device.h"

namespace hasten::device_linear_test {

using testing_support::test_device;

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes).to(test_device(), dtype).requires_grad_();
}

double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor wide = b.cpu().to(at::kDouble);
  return ((a.cpu().to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
}

// Torch rounds the gradients of weight and bias to 16 bits before it makes them fp32.
TEST(DeviceLinear, UnderAutocastItIsOneNodeWithTorchsNumbers) {
  torch::manual_seed(1);
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType stored : {at::kFloat, narrow}) {
      const at::Tensor x = leaf({2, 8, 32}, at::kFloat), weight = leaf({48, 32}, stored),
                       bias = leaf({48}, stored);
      const auto run = [&](bool ours) {
        const Autocast autocast({.device = test_device().type(), .dtype = narrow});
        const at::Tensor y = ours ? fast_linear(x, weight, bias) : at::linear(x, weight, bias);
        return std::pair(
            y, torch::autograd::grad({y.to(at::kFloat).square().sum()}, {x, weight, bias}));
      };
      const auto [y, ours] = run(true);
      const auto [expected, torchs] = run(false);
      EXPECT_EQ(y.grad_fn()->name(), "hasten::LinearNode");
      EXPECT_EQ(y.scalar_type(), narrow);
      EXPECT_TRUE(y.equal(expected));
      EXPECT_TRUE(ours[0].equal(torchs[0]));
      const double rounding = narrow == at::kHalf ? 1e-3 : 8e-3;
      for (const size_t i : {1, 2}) {
        EXPECT_EQ(ours[i].scalar_type(), stored);
        EXPECT_LT(relative_difference(ours[i], torchs[i]), rounding);
      }
    }
  }
}

TEST(DeviceLinear, UnderAutocastItIsDifferentiableTwiceAndItsResultMayChange) {
  torch::manual_seed(2);
  const at::Tensor x = leaf({16, 32}, at::kFloat), weight = leaf({24, 32}, at::kFloat);
  const Activation gelu{"gelu"};
  const auto run = [&](bool ours) {
    const Autocast autocast({.device = test_device().type(), .dtype = at::kBFloat16});
    at::Tensor y = ours ? fast_linear(gelu, x, weight) : at::linear(at::gelu(x), weight);
    y.mul_(2); // of the result, which backward does not read
    const auto first =
        torch::autograd::grad({y.to(at::kFloat).square().sum()}, {x, weight}, {}, true, true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {x, weight});
  };
  const auto ours = run(true), torchs = run(false);
  for (const size_t i : {0, 1}) {
    EXPECT_LT(relative_difference(ours[i], torchs[i]), 2e-2);
  }
}

TEST(DeviceLinear, WithoutAutocastItIsTorchs) {
  const at::Tensor x = leaf({16, 32}, at::kFloat), weight = leaf({24, 32}, at::kFloat);
  EXPECT_NE(fast_linear(x, weight).grad_fn()->name(), "hasten::LinearNode");
  EXPECT_ANY_THROW(fast_linear(x, leaf({24, 31}, at::kFloat)));
  const Autocast autocast({.device = test_device().type(), .dtype = at::kBFloat16});
  EXPECT_ANY_THROW(fast_linear(x, leaf({24, 31}, at::kFloat))) << "torch's error for shapes";
}

} // namespace hasten::device_linear_test
