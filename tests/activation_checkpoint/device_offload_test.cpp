// Offload of the tensors that a device saves for backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <optional>
#include <thread>

#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/activation_checkpoint/saved_memory.h"
#include "hasten/core/memory.h"
#include "support/test_device.h"

namespace hasten {

using at::Tensor;
using testing_support::device_counters;
using testing_support::DeviceCounters;
using testing_support::test_device;

constexpr int kLayers = 16;
constexpr int64_t kOne = 256 * 256 * 4; // bytes of an activation

struct Step {
  std::vector<Tensor> gradients{}; // on the CPU
  int64_t peak = 0;
  int64_t left = 0; // after forward
  int64_t offloaded = 0;
  DeviceCounters counters{};
};

/// Forward and backward of layers that save their input and output.
static Step run(bool offload, bool regions = false, bool twice = false) {
  torch::manual_seed(3);
  const Tensor x = torch::randn({256, 256}).to(test_device()).requires_grad_();
  const Tensor w = torch::randn({256, 256}).mul(0.05).to(test_device()).requires_grad_();
  Step step;
  reset_peak_memory(test_device());
  const int64_t before = memory_stats(test_device()).live_bytes;
  const DeviceCounters counted = device_counters();
  {
    Tensor loss;
    {
      std::optional<SavedTensorOffload> guard;
      if (offload) {
        guard.emplace(SavedTensorOffloadOptions{.min_bytes = 1024});
      }
      Tensor y = x;
      for (int i = 0; i < kLayers; ++i) {
        const auto layer = [&](const Tensor& in) { return torch::sigmoid(in.mm(w)).t(); };
        y = regions ? activation_checkpoint(layer, y) : layer(y);
      }
      loss = y.sum();
      step.offloaded = guard ? guard->bytes() : 0;
    }
    step.left = memory_stats(test_device()).live_bytes - before;
    if (twice) {
      loss.backward({}, /*retain_graph=*/true);
      x.mutable_grad() = w.mutable_grad() = Tensor();
    }
    loss.backward();
  }
  step.counters = device_counters() - counted;
  step.peak = memory_stats(test_device()).peak_bytes - before;
  step.gradients = {x.grad().cpu(), w.grad().cpu()};
  return step;
}

static void expect_same(const Step& a, const Step& b) {
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    EXPECT_TRUE(a.gradients[i].equal(b.gradients[i])) << i;
  }
}

TEST(DeviceOffload, ReadsBackTheSameBitsWithLessMemoryAndTheHostWaitsForNothing) {
  const Step plain = run(false);
  const Step less = run(true);
  expect_same(plain, less);
  EXPECT_GE(plain.left, kLayers * kOne);
  EXPECT_LE(less.left, 4 + kOne) << "the loss, and nothing that is saved";
  EXPECT_GE(less.offloaded, kLayers * kOne);
  EXPECT_LE(less.peak, plain.peak / 2);
  EXPECT_EQ(less.counters.syncs, plain.counters.syncs);
  EXPECT_EQ(less.counters.pageable_copies, 0);
  EXPECT_EQ(less.counters.bytes_to_host, less.offloaded) << "each storage once";
}

TEST(DeviceOffload, ServesRegionsAndASecondBackward) {
  expect_same(run(false), run(true, true));
  expect_same(run(false), run(true, false, true));
}

TEST(DeviceOffload, AGraphThatIsDroppedFreesItsMemory) {
  const Tensor x = torch::randn({256, 256}).to(test_device()).requires_grad_();
  const int64_t before = memory_stats(test_device()).live_bytes;
  SavedTensorOffload guard({.min_bytes = 1024});
  {
    Tensor y = x * 2;
    Tensor z = y.sigmoid().tanh().sin();
    z.sum();
    // The first gradients fetch a storage in advance that no backward reads.
    torch::autograd::grad({z}, {x}, {torch::ones_like(z)});
    y = (x * 3).sigmoid();
    z = y.tanh();
    torch::autograd::grad({z}, {y}, {torch::ones_like(z)});
  }
  EXPECT_EQ(guard.bytes(), 0);
  // The thread of the device's backward drops its last tensors after grad() has returned.
  const auto left = [&] { return memory_stats(test_device()).live_bytes - before; };
  for (int tries = 0; tries < 5000 && left() != 2 * kOne; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(left(), 2 * kOne) << "the last two copies";
}

} // namespace hasten
