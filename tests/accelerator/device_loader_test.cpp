// Prepared loaders copy batches to a device on a stream of their own.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/core/memory.h"
#include "support/device_memory.h"
#include "support/test_device.h"

namespace hasten {

using at::Tensor;
using testing_support::device_counters;
using testing_support::DeviceCounters;
using testing_support::test_device;

constexpr int kBatches = 6;
constexpr int64_t kBatchBytes = 64 * 256 * 4;

static Accelerator on_the_device(DataLoaderConfiguration config) {
  return Accelerator({.device = "test_device:0", .dataloader_config = config});
}

static std::shared_ptr<std::vector<Tensor>> batches() {
  auto made = std::make_shared<std::vector<Tensor>>();
  for (int i = 0; i < kBatches; ++i) {
    made->push_back(torch::full({64, 256}, i + 1.0F));
  }
  return made;
}

/// The stream on which the tensor's memory was allocated.
static int home_of(const Tensor& tensor) {
  const testing_support::machine::Lock lock(testing_support::machine::machine().mutex);
  return testing_support::machine::find_block(tensor.storage().data())->home;
}

TEST(DeviceLoader, CopiesOneBatchAheadAndTheHostWaitsForNone) {
  for (const int64_t prefetch : {0, 2}) {
    Accelerator accelerator = on_the_device({.prefetch = prefetch});
    auto loader = accelerator.prepare(batches());
    Tensor sum = torch::zeros({64, 256}, test_device());
    const int64_t live = memory_stats(test_device()).live_bytes;
    reset_peak_memory(test_device());
    const DeviceCounters before = device_counters();
    for (const Tensor& batch : loader) {
      EXPECT_EQ(batch.device(), test_device());
      EXPECT_NE(home_of(batch), 0) << "on the loop's own stream";
      sum.add_(batch);
    }
    const DeviceCounters done = device_counters() - before;
    EXPECT_EQ(done.copies_to_device, kBatches);
    EXPECT_EQ(done.pageable_copies, 0);
    EXPECT_EQ(done.syncs, 0);
    EXPECT_EQ(memory_stats(test_device()).peak_bytes - live, 2 * kBatchBytes);
    EXPECT_TRUE(sum.cpu().equal(torch::full({64, 256}, 21.0F)));
  }
}

TEST(DeviceLoader, WithoutNonBlockingEachCopyBlocks) {
  Accelerator accelerator = on_the_device({.non_blocking = false});
  auto loader = accelerator.prepare(batches());
  const DeviceCounters before = device_counters();
  for (const Tensor& batch : loader) {
    EXPECT_EQ(home_of(batch), 0);
  }
  EXPECT_EQ((device_counters() - before).syncs, kBatches);
}

TEST(DeviceLoader, ALoopThatEndsEarlyLeavesNothing) {
  Accelerator accelerator = on_the_device({.prefetch = 1});
  auto loader = accelerator.prepare(batches());
  const int64_t live = memory_stats(test_device()).live_bytes;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const Tensor& batch : loader) {
      if (batch.mul(2).size(0) == 64) {
        break;
      }
    }
  }
  loader.set_epoch(0);
  for (const Tensor& batch : loader) {
    batch.mul(2);
  }
  EXPECT_EQ(memory_stats(test_device()).live_bytes, live);
}

/// A batch whose type has a to_device() of its own.
struct OwnBatch {
  Tensor x;
};
OwnBatch to_device(OwnBatch batch, const at::Device& device) { return {batch.x.to(device).mul(2)}; }

TEST(DeviceLoader, ATypesOwnToDeviceRunsOnTheLoopsStream) {
  Accelerator accelerator = on_the_device({});
  std::vector<OwnBatch> batches{{torch::ones({2})}, {torch::ones({2})}};
  auto loader = accelerator.prepare(batches);
  float sum = 0;
  for (const OwnBatch& batch : loader) {
    EXPECT_EQ(home_of(batch.x), 0);
    sum += batch.x.sum().item<float>();
  }
  EXPECT_EQ(sum, 8);
}

} // namespace hasten
