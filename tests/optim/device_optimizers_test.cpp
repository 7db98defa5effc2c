// Optimizers on a device work on lists: a step does not start an operator for each parameter.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/optim/adafactor.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/lion.h"
#include "hasten/optim/sgd.h"
#include "support/test_device.h"

namespace hasten::device_optimizers_test {

using testing_support::device_counters;
using testing_support::test_device;
using Tensors = std::vector<at::Tensor>;

/// Matrices and vectors in turns, with gradients.
static Tensors parameters(int64_t pairs, at::ScalarType dtype) {
  Tensors made;
  for (int64_t i = 0; i < pairs; ++i) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{6, 4}, {6}}) {
      const auto options = at::TensorOptions(test_device()).dtype(dtype);
      made.push_back(torch::ones(shape, options).requires_grad_());
      made.back().mutable_grad() = torch::ones(shape, options);
    }
  }
  return made;
}

/// Operators of the second step, when the state is there.
template <typename Optimizer, typename Options>
static int64_t operators(const Options& options, int64_t pairs, at::ScalarType dtype,
                         FusedOptions fused) {
  Optimizer optimizer(parameters(pairs, dtype), options, fused);
  optimizer.step_and_zero(0.5);
  const auto before = device_counters();
  optimizer.step_and_zero(0.5);
  EXPECT_EQ((device_counters() - before).syncs, 0);
  return (device_counters() - before).operators;
}

template <typename Optimizer, typename Options>
static void expect_lists(const Options& options, FusedOptions fused = {}) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const int64_t few = operators<Optimizer>(options, 2, dtype, fused);
    EXPECT_EQ(operators<Optimizer>(options, 20, dtype, fused), few) << dtype;
    EXPECT_LE(few, 90) << dtype;
  }
}

TEST(DeviceOptimizers, OperatorsOfAStepDoNotGrowWithTheParameters) {
  expect_lists<AdamW>(torch::optim::AdamWOptions(0.1));
  expect_lists<Adam>(torch::optim::AdamOptions(0.1));
  expect_lists<SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_lists<AdamW8bit>(torch::optim::AdamWOptions(0.1), {.min_8bit_size = 1});
  expect_lists<Lion>(LionOptions(0.1));
  expect_lists<Adafactor>(AdafactorOptions().beta1(0.9));
}

TEST(DeviceOptimizers, ListsThatAreCutUpdateEachParameterOnce) {
  const auto options = at::TensorOptions(test_device()).dtype(at::kBFloat16);
  Tensors all;
  for (const int64_t count : {1 << 24, 1 << 22, 1 << 24, 3, (1 << 25) + 1}) {
    all.push_back(torch::full({count}, 2.0, options).requires_grad_());
    all.back().mutable_grad() = torch::ones({count}, options);
  }
  SGD sgd(all, torch::optim::SGDOptions(0.5));
  sgd.step();
  for (const at::Tensor& parameter : all) {
    EXPECT_TRUE((parameter == 1.5).all().item<bool>()) << parameter.numel();
  }
}

TEST(DeviceOptimizers, AMasterFollowsAParameterThatWasChanged) {
  const auto options = at::TensorOptions(test_device()).dtype(at::kBFloat16);
  at::Tensor parameter = torch::ones({2, 3}, options).requires_grad_();
  parameter.mutable_grad() = torch::full({2, 3}, 0x1p-10, options);
  SGD sgd(Tensors{parameter}, torch::optim::SGDOptions(1.0));
  const auto values = [&] { return parameter.detach().to(at::kCPU, at::kFloat); };
  sgd.step();
  EXPECT_TRUE(torch::equal(values(), torch::ones({2, 3}))) << "less than half a unit";
  {
    const at::NoGradGuard no_grad;
    parameter[0].fill_(2.0);
  }
  sgd.step();
  sgd.step();
  sgd.step();
  // 1 - 4 * 2^-10 is a value of bf16; 2 - 3 * 2^-10 rounds to 2.
  const at::Tensor expected = torch::tensor({2.0F, 1 - 0x1p-8F}).unsqueeze(1).expand({2, 3});
  EXPECT_TRUE(torch::equal(values(), expected)) << values();
}

} // namespace hasten::device_optimizers_test
