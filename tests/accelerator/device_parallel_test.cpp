// Data parallelism on a device whose collectives run on streams of their own.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/core/block_call.h"
#include "hasten/core/memory.h"
#include "support/device_backend.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten::device_parallel_test {

using at::Tensor;
using testing_support::device_counters;
using testing_support::device_world;
using testing_support::RankReport;
using testing_support::take_device_errors;
using testing_support::test_device;

constexpr int kBlocks = 6;
constexpr int64_t kWidth = 192;
constexpr int64_t kBlockBytes = kWidth * kWidth * 4;

struct StackImpl : torch::nn::Module {
  StackImpl() {
    auto list = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < kBlocks; ++i) {
      blocks.emplace_back(kWidth, kWidth);
      list->push_back(blocks.back());
    }
    head = register_module("head", torch::nn::Linear(kWidth, 3));
  }
  Tensor forward(Tensor x) {
    for (auto& block : blocks) {
      x = torch::tanh(call_block(block, x));
    }
    return head(x);
  }
  std::vector<torch::nn::Linear> blocks{};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Stack);

struct Trained {
  std::vector<Tensor> losses{}; // on the CPU
  int64_t pageable = 0;
  int64_t forward_peak = 0; // bytes above what lives between steps
};

static Trained train(const std::shared_ptr<Communicator>& communicator, const std::string& device,
                     Strategy strategy, int64_t accumulation) {
  AcceleratorOptions options{
      .gradient_accumulation_steps = accumulation, .device = device, .strategy = strategy};
  options.bucket_cap_mb = 0.1;
  Accelerator accelerator(options, communicator);
  Stack net;
  auto sgd = std::make_shared<torch::optim::SGD>(net->parameters(), 0.05);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  Trained result;
  const int64_t pageable = device_counters().pageable_copies;
  torch::manual_seed(communicator->rank());
  for (int i = 0; i < 4; ++i) {
    const Tensor x = torch::randn({8, kWidth}).to(accelerator.device());
    auto window = accelerator.accumulate(net);
    reset_peak_memory(accelerator.device());
    const int64_t before = memory_stats(accelerator.device()).live_bytes;
    Tensor loss = net->forward(x).square().sum();
    result.forward_peak = memory_stats(accelerator.device()).peak_bytes - before;
    accelerator.backward(loss, 8);
    optimizer.step();
    optimizer.zero_grad();
    result.losses.push_back(loss.detach().cpu());
  }
  result.pageable = device_counters().pageable_copies - pageable;
  return result;
}

HASTEN_RANK_FUNCTION(TrainOnBothDevices) {
  const auto communicator = device_world(rank.world(), 0);
  for (const Strategy strategy : {Strategy::ddp, Strategy::zero2, Strategy::fsdp}) {
    for (const int64_t accumulation : {1, 2}) {
      install_memory_meter();
      const Trained on_cpu = train(communicator, "cpu", strategy, accumulation);
      const Trained there = train(communicator, "test_device:0", strategy, accumulation);
      const std::string what = spelling(strategy) + std::string(" ") + std::to_string(accumulation);
      for (size_t i = 0; i < on_cpu.losses.size(); ++i) {
        EXPECT_TRUE(at::allclose(there.losses[i], on_cpu.losses[i], 1e-5)) << what << i;
      }
      EXPECT_EQ(there.pageable, 0) << what;
      if (strategy == Strategy::fsdp) {
        // The unit in use, the one that is gathered ahead, and activations. Not all units.
        EXPECT_LT(there.forward_peak, 3 * kBlockBytes) << what;
      }
      for (const std::string& error : take_device_errors()) {
        ADD_FAILURE() << what << ": " << error;
      }
    }
  }
  communicator->close();
}

TEST(DeviceParallel, TwoRanksTrainAsOnTheCpuWithoutAMissingEvent) {
  for (const RankReport& rank : testing_support::spawn(2, "TrainOnBothDevices", {},
                                                       {.deadline = std::chrono::seconds(200)})) {
    EXPECT_EQ(rank.error, "");
    EXPECT_EQ(rank.end.code, 0);
  }
}

} // namespace hasten::device_parallel_test
