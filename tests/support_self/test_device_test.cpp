// The test device itself: memory, copies, operators, generators, statistics, autocast.
#include "support/test_device.h"

#include <ATen/autocast_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <optional>
#include <vector>

namespace hasten {

using testing_support::device_counters;
using testing_support::test_device;

static at::TensorOptions there(at::ScalarType type = at::kFloat) {
  return at::TensorOptions(test_device()).dtype(type);
}

static float first_value(const at::Tensor& tensor) {
  return *static_cast<const volatile float*>(tensor.const_data_ptr());
}

TEST(TestDevice, AHostReadIsAFault) {
  const at::Tensor x = at::ones({4}, there());
  EXPECT_EXIT(first_value(x), testing::KilledBySignal(SIGSEGV),
              "The host touches memory of the test device");
  EXPECT_TRUE(x.cpu().equal(at::ones({4})));
}

TEST(TestDevice, PinnedMemoryReadBeforeItsCopyIsAFault) {
  const at::Tensor x = at::ones({4}, there());
  const at::Tensor pinned = at::zeros({4}).pin_memory();
  EXPECT_EQ(first_value(pinned), 0);
  pinned.copy_(x, /*non_blocking=*/true);
  EXPECT_EXIT(first_value(pinned), testing::KilledBySignal(SIGSEGV),
              "The host uses pinned memory before the copy into it is done");
  c10::impl::VirtualGuardImpl(at::kPrivateUse1).synchronizeDevice(0);
  EXPECT_EQ(first_value(pinned), 1);
}

TEST(TestDevice, PinnedMemoryWrittenBeforeItsCopyIsAFault) {
  const at::Tensor pinned = at::ones({4}).pin_memory();
  const at::Tensor x = pinned.to(test_device(), at::kFloat, /*non_blocking=*/true);
  EXPECT_EQ(first_value(pinned), 1);
  EXPECT_EXIT(pinned.zero_(), testing::KilledBySignal(SIGSEGV),
              "The host writes pinned memory before the copy from it is done");
  EXPECT_EQ(x.sum().item<float>(), 4);
  pinned.zero_();
}

TEST(TestDevice, APageableCopyIsCounted) {
  const at::Tensor pinned = at::ones({4}).pin_memory();
  auto before = device_counters();
  const at::Tensor x = pinned.to(test_device(), at::kFloat, /*non_blocking=*/true);
  auto now = device_counters() - before;
  EXPECT_EQ(now.copies_to_device, 1);
  EXPECT_EQ(now.bytes_to_device, 16);
  EXPECT_EQ(now.pageable_copies, 0);
  EXPECT_EQ(now.syncs, 0);

  before = device_counters();
  const at::Tensor y = at::ones({4}).to(test_device(), at::kFloat, /*non_blocking=*/true);
  at::empty({4}).copy_(y, /*non_blocking=*/true);
  now = device_counters() - before;
  EXPECT_EQ(now.pageable_copies, 2);
  EXPECT_EQ(now.copies_to_host, 1);
  EXPECT_EQ(now.bytes_to_host, 16);
  EXPECT_EQ(now.syncs, 2);
}

TEST(TestDevice, ValuesAndShapesThatDependOnDataAreHostSyncs) {
  const at::Tensor x = at::arange(4, there());
  const auto before = device_counters();
  const at::Tensor y = (x * 2).add_(1);
  EXPECT_EQ((device_counters() - before).syncs, 0);
  EXPECT_EQ((device_counters() - before).operators, 2);
  EXPECT_EQ(x.sum().item<float>(), 6);
  EXPECT_EQ((device_counters() - before).syncs, 1);
  EXPECT_EQ(x.nonzero().size(0), 3);
  EXPECT_EQ((device_counters() - before).syncs, 2);
  EXPECT_EQ(x.index({x > 1}).numel(), 2);
  EXPECT_EQ((device_counters() - before).syncs, 3);
  x.index_put_({x > 1}, at::zeros({2}, there()));
  EXPECT_EQ((device_counters() - before).syncs, 4);
  EXPECT_TRUE(at::equal(x, x));
  EXPECT_EQ((device_counters() - before).syncs, 5);
}

TEST(TestDevice, FreshMemoryIsNaN) {
  EXPECT_TRUE(at::empty({100}, there()).isnan().all().item<bool>());
  EXPECT_TRUE(at::empty({100}, there(at::kBFloat16)).isnan().all().item<bool>());
}

TEST(TestDevice, TensorsOfTwoDevicesAreAnError) {
  const at::Tensor x = at::ones({4}, there());
  EXPECT_THROW(x + at::ones({4}), c10::Error);
  EXPECT_THROW(at::ones({4}).add_(x), c10::Error);
  EXPECT_THROW(x + at::ones({4}, test_device(1)), c10::Error);
  EXPECT_EQ((x + at::scalar_tensor(2.0)).sum().item<float>(), 12);
  EXPECT_TRUE(x.to(test_device(1)).cpu().equal(at::ones({4})));
}

TEST(TestDevice, OperatorsEqualTheCpus) {
  torch::manual_seed(1);
  const at::Tensor host = at::randn({2, 4, 8, 16});
  const at::Tensor x = host.to(test_device());
  EXPECT_TRUE(
      x.transpose(1, 2).reshape({2, 8, 64}).cpu().equal(host.transpose(1, 2).reshape({2, 8, 64})));
  EXPECT_TRUE(at::cat({x, x}, 1).cpu().equal(at::cat({host, host}, 1)));
  // Other orders of sums, by the number of threads.
  EXPECT_TRUE(at::scaled_dot_product_attention(x, x, x).cpu().allclose(
      at::scaled_dot_product_attention(host, host, host), 1e-5, 1e-6));
  const std::vector<at::Tensor> list{x.clone(), x[0].clone()};
  at::_foreach_mul_(list, 2);
  EXPECT_TRUE(list[1].cpu().equal(host[0] * 2));
  at::Tensor sum = at::empty({0}, there());
  at::sum_out(sum, x, {1});
  EXPECT_TRUE(sum.cpu().allclose(host.sum(1)));
  const at::Tensor index = at::tensor({3, 1}, at::kLong).to(test_device());
  EXPECT_TRUE(x.index_select(3, index).cpu().equal(host.index_select(3, index.cpu())));
}

TEST(TestDevice, ConvolutionsEqualTheCpus) {
  const auto run = [](const at::Device& device) {
    torch::manual_seed(2);
    torch::nn::Conv1d layer(torch::nn::Conv1dOptions(3, 4, 3).padding(1).bias(false));
    const at::Tensor x = at::randn({2, 3, 8});
    layer->to(device);
    const at::Tensor y = layer(x.to(device));
    y.pow(2).sum().backward();
    return std::vector<at::Tensor>{y.detach().cpu(), layer->weight.grad().cpu()};
  };
  const auto expected = run(at::kCPU);
  const auto actual = run(test_device());
  EXPECT_TRUE(actual[0].allclose(expected[0]));
  EXPECT_TRUE(actual[1].allclose(expected[1]));
}

/// Losses, then the first weight.
static std::vector<at::Tensor> train(const at::Device& device) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::GELU(),
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                            torch::nn::Linear(16, 4));
  const at::Tensor x = at::randn({32, 8}).to(device);
  const at::Tensor y = at::randint(4, {32}).to(device);
  net->to(device);
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<at::Tensor> values;
  for (int step = 0; step < 5; ++step) {
    adam.zero_grad();
    const at::Tensor loss = torch::nn::functional::cross_entropy(net->forward(x), y);
    loss.backward();
    adam.step();
    values.push_back(loss.detach().cpu());
  }
  values.push_back(net->parameters()[0].detach().cpu());
  return values;
}

TEST(TestDevice, FiveStepsOfAdamWEqualTheCpus) {
  const auto expected = train(at::kCPU);
  const auto actual = train(test_device());
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 0, 1e-6)) << i;
  }
  EXPECT_LT(actual[4].item<float>(), actual[0].item<float>());
}

/// The dtypes of a layer's output and of its softmax under autocast.
static void expect_autocast(at::ScalarType type) {
  torch::nn::Linear layer(8, 8);
  layer->to(test_device());
  const at::Tensor x = at::randn({2, 8}, there());
  at::autocast::set_autocast_enabled(at::kPrivateUse1, true);
  at::autocast::set_autocast_dtype(at::kPrivateUse1, type);
  const at::Tensor y = layer(x);
  const at::Tensor z = y.softmax(1);
  at::autocast::set_autocast_enabled(at::kPrivateUse1, false);
  at::autocast::clear_cache();
  EXPECT_EQ(y.scalar_type(), type);
  EXPECT_EQ(z.scalar_type(), at::kFloat);
  z.select(1, 0).sum().backward();
  EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(layer->weight.grad().device(), test_device());
}

TEST(TestDevice, AutocastInBf16HasCudasLists) { expect_autocast(at::kBFloat16); }

TEST(TestDevice, AutocastInFp16HasCudasLists) { expect_autocast(at::kHalf); }

TEST(TestDevice, GradScalersOperatorsFindAnOverflow) {
  std::vector<at::Tensor> gradients{at::full({3}, 8, there()), at::full({2}, 4, there())};
  at::Tensor found = at::zeros({1}, there());
  const at::Tensor inverse = at::full({1}, 0.5, there());
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  EXPECT_EQ(found.item<float>(), 0);
  EXPECT_EQ(gradients[0][2].item<float>(), 4);
  gradients[1][0] = INFINITY;
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  EXPECT_EQ(found.item<float>(), 1);
  at::Tensor scale = at::full({1}, 4, there());
  at::Tensor growth = at::zeros({1}, there(at::kInt));
  at::_amp_update_scale_(scale, growth, found, 2, 0.5, 100);
  EXPECT_EQ(scale.item<float>(), 2);
}

TEST(TestDevice, GeneratorHasAStateOfItsOwn) {
  at::Generator generator = at::globalContext().defaultGenerator(test_device());
  const at::Tensor host = at::globalContext().defaultGenerator(at::kCPU).get_state();
  const at::Tensor state = generator.get_state();
  const auto draw = [] {
    return std::vector<at::Tensor>{at::randn({4}, there()).cpu(), at::randperm(9, there()).cpu(),
                                   at::dropout(at::ones({64}, there()), 0.5, true).cpu()};
  };
  const auto first = draw();
  const auto next = draw();
  generator.set_state(state);
  const auto again = draw();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(again[i].equal(first[i])) << i;
    EXPECT_FALSE(next[i].equal(first[i])) << i;
  }
  EXPECT_TRUE(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(host));
  EXPECT_FALSE(at::globalContext().defaultGenerator(test_device(1)) == generator);
}

TEST(TestDevice, SeedSetsEveryGenerator) {
  const auto draw = [](int device) {
    at::manual_seed(5);
    return at::randn({4}, test_device(device)).cpu();
  };
  EXPECT_TRUE(draw(0).equal(draw(0)));
  EXPECT_TRUE(draw(1).equal(draw(1)));
}

static c10::CachingAllocator::Stat bytes_in_use(int device = 0) {
  return c10::getDeviceAllocator(at::kPrivateUse1)
      ->getDeviceStats(static_cast<c10::DeviceIndex>(device))
      .allocated_bytes[0];
}

TEST(TestDevice, StatisticsCountBytesAndThePeak) {
  auto* allocator = c10::getDeviceAllocator(at::kPrivateUse1);
  allocator->resetPeakStats(0);
  const int64_t before = bytes_in_use().current;
  const int64_t other = bytes_in_use(1).current;
  at::Tensor x = at::zeros({1000}, there());
  EXPECT_EQ(bytes_in_use().current - before, 4000);
  x.reset();
  EXPECT_EQ(bytes_in_use().current, before);
  EXPECT_EQ(bytes_in_use().peak - before, 4000);
  allocator->resetPeakStats(0);
  EXPECT_EQ(bytes_in_use().peak, before);
  EXPECT_EQ(bytes_in_use(1).current, other);
  allocator->emptyCache();
}

TEST(TestDevice, AllocationBeyondTheLimitIsOutOfMemory) {
  const auto in_use = static_cast<size_t>(bytes_in_use().current);
  testing_support::set_device_memory_limit(in_use + 4096);
  EXPECT_EQ(c10::getDeviceAllocator(at::kPrivateUse1)->getMemoryInfo(0).first, 4096u);
  std::optional<at::Tensor> x = at::zeros({1000}, there());
  EXPECT_THROW(at::zeros({1000}, there()), c10::OutOfMemoryError);
  x.reset();
  EXPECT_EQ(at::zeros({1000}, there()).sum().item<float>(), 0);
}

} // namespace hasten
