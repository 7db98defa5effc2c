// A deferred model is made on a device parameter by parameter, and a sharded one unit by unit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/memory.h"
#include "support/device_backend.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten {

using at::Tensor;
using testing_support::FaultRank;
using testing_support::test_device;

constexpr int64_t kLargest = 256 * 256 * 4; // bytes of a parameter

static torch::nn::Sequential make_layers() {
  torch::manual_seed(5);
  torch::nn::Sequential layers;
  for (int i = 0; i < 8; ++i) {
    layers->push_back(torch::nn::Linear(256, 256));
  }
  layers->push_back(torch::nn::BatchNorm1d(256));
  return layers;
}

TEST(DeviceDeferred, TheHostHoldsOneParameterAtATime) {
  install_memory_meter();
  torch::nn::Sequential plain = make_layers();
  torch::nn::Sequential deferred = deferred_init(make_layers, {.resident_bytes = 0});
  const Tensor random = torch::randn({3});
  Accelerator accelerator({.seed = std::nullopt, .device = "test_device:0"});
  const int64_t before = memory_stats().live_bytes;
  reset_peak_memory();
  accelerator.prepare(deferred);
  EXPECT_LT(memory_stats().peak_bytes - before, kLargest + 4096);
  EXPECT_LE(memory_stats().live_bytes, before);
  EXPECT_GE(memory_stats(test_device()).live_bytes, 8 * kLargest);
  const auto expected = plain->named_parameters();
  for (const auto& item : deferred->named_parameters()) {
    EXPECT_EQ(item.value().device(), test_device());
    EXPECT_TRUE(item.value().requires_grad());
    EXPECT_TRUE(item.value().cpu().equal(expected[item.key()])) << item.key();
  }
  for (const Tensor& buffer : deferred->buffers()) {
    EXPECT_EQ(buffer.device(), test_device());
  }
}

// The model has 8 large parameters. A rank's shards are half of it.
HASTEN_RANK_FUNCTION(ShardWhatDoesNotFit) {
  const auto world = testing_support::device_world(rank.world());
  const torch::nn::Sequential plain = make_layers();
  for (const bool deferred : {true, false}) {
    SCOPED_TRACE(deferred);
    Accelerator accelerator(
        {.seed = std::nullopt, .device = "test_device", .strategy = Strategy::fsdp},
        world->duplicate({.name = deferred ? "deferred" : "on the host"}));
    auto layers = deferred ? deferred_init(make_layers, {.resident_bytes = 0}) : make_layers();
    testing_support::set_device_memory_limit(
        static_cast<size_t>(memory_stats(accelerator.device()).live_bytes + 7 * kLargest));
    accelerator.prepare(layers);
    testing_support::set_device_memory_limit(0);
    for (const Tensor& buffer : layers->buffers()) {
      EXPECT_EQ(buffer.device(), accelerator.device());
    }
    const auto whole = accelerator.get_state_dict(layers);
    EXPECT_EQ(whole.size(), rank.world().rank == 0 ? plain->parameters().size() + 3 : 0u);
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(whole.empty() || whole.at(item.key()).cpu().equal(item.value())) << item.key();
    }
    accelerator.end_training();
  }
  world->close();
}

TEST(DeviceDeferred, AModelThatFitsOnlyShardedIsSharded) {
  for (const auto& report : testing_support::spawn(2, "ShardWhatDoesNotFit")) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.end.code, 0);
  }
}

TEST(DeviceDeferred, TiedParametersStayOneTensor) {
  struct Tied : torch::nn::Module {
    Tied() {
      words = register_module("words", torch::nn::Embedding(20, 6));
      register_parameter("head", words->weight);
    }
    torch::nn::Embedding words{nullptr};
  };
  const auto made = deferred_init([] { return std::make_shared<Tied>(); });
  materialize(*made, test_device());
  EXPECT_TRUE(made->named_parameters()["head"].is_same(made->words->weight));
  EXPECT_EQ(made->words->weight.device(), test_device());
}

} // namespace hasten
