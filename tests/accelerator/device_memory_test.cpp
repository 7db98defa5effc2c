// Limits and shortages of a device's memory.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "activation_checkpoint/block_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/accelerator/find_batch_size.h"
#include "hasten/core/memory.h"
#include "support/device_backend.h"
#include "support/error_of.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten::device_memory_test {

using at::Tensor;
using testing::IsSubstring;
using testing_support::device_world;
using testing_support::error_of;
using testing_support::RankReport;
using testing_support::set_device_memory_limit;
using testing_support::take_device_errors;
using testing_support::test_device;

static int64_t live() { return memory_stats(test_device()).live_bytes; }
static void limit_to(int64_t bytes) { set_device_memory_limit(static_cast<size_t>(bytes)); }

TEST(DeviceMemory, WhatIsLeftIsWhatTheDeviceDoesNotUse) {
  const Tensor x = torch::zeros({1000}, test_device());
  limit_to(live() + 5000);
  EXPECT_EQ(memory_left(test_device()), 5000);
  EXPECT_GT(memory_left(), 0);
}

/// The size found on a device with a limit of `rows` rows, and the sizes tried.
static std::pair<int64_t, std::vector<int64_t>> find(const at::Device& device, bool of_options) {
  install_memory_meter();
  std::vector<int64_t> tried;
  FindBatchSizeOptions options{.starting_batch_size = 16, .device = device};
  const int64_t limit = memory_stats(device).live_bytes + 5 * 4000;
  if (of_options) {
    options.memory_limit_bytes = limit;
  } else {
    limit_to(limit);
  }
  const int64_t found = find_executable_batch_size(
      [&](int64_t rows) {
        tried.push_back(rows);
        torch::empty({rows, 1000}, device);
      },
      options);
  limit_to(0);
  return {found, tried};
}

TEST(DeviceMemory, TheSameLimitFindsTheSameBatchSizeAsOnTheCpu) {
  const auto on_cpu = find(at::kCPU, true);
  EXPECT_EQ(on_cpu.first, 4);
  EXPECT_EQ(find(test_device(), true), on_cpu);
  EXPECT_EQ(find(test_device(), false), on_cpu) << "the device's own limit";
}

TEST(DeviceMemory, NoSizeFitsNamesTheDeviceAndTheLimit) {
  const std::string error = error_of([] {
    find_executable_batch_size(
        [](int64_t) { torch::empty({1000}, test_device()); },
        {.starting_batch_size = 1, .memory_limit_bytes = live() + 1000, .device = test_device()});
  });
  EXPECT_PRED_FORMAT2(IsSubstring, "on test_device:0 exceeds the limit", error);
}

TEST(DeviceMemory, ABudgetHoldsAsOnTheCpu) {
  const auto plan_on = [](const at::Device& device, double share) {
    torch::manual_seed(3);
    testing_support::Straight model(6, 32);
    model->to(device);
    const Tensor x = torch::randn({256, 32}).to(device);
    const auto loss = [&] { return model->forward(x).square().sum(); };
    const ChainProfile profile = profile_activations(model.ptr(), loss);
    const int64_t least = least_budget(profile);
    const auto budget = static_cast<int64_t>(
        static_cast<double>(least) + share * static_cast<double>(full_budget(profile) - least));
    const auto plan = enable_within_budget(
        model.ptr(), loss, GradientCheckpointing("budget:" + std::to_string(budget)));
    EXPECT_LE(plan->observed_peak_bytes, budget) << share;
    EXPECT_EQ(observe_peak(model.ptr(), loss), plan->observed_peak_bytes);
    return std::pair(plan->regions.empty(), full_budget(profile));
  };
  for (const double share : {0.1, 0.5, 1.0}) {
    const auto on_cpu = plan_on(at::kCPU, share);
    const auto on_device = plan_on(test_device(), share);
    EXPECT_EQ(on_device.first, on_cpu.first) << share;
    EXPECT_NEAR(static_cast<double>(on_device.second) / static_cast<double>(on_cpu.second), 1, 0.2);
  }
}

/// A training loop's parts on the device.
struct Loop {
  explicit Loop(std::shared_ptr<Communicator> communicator = nullptr, Strategy s = Strategy::ddp)
      : accelerator({.device = "test_device:0", .strategy = s}, std::move(communicator)) {
    net->push_back(torch::nn::Linear(64, 64));
    net->push_back(torch::nn::Tanh());
    net->push_back(torch::nn::Linear(64, 64));
    sgd = std::make_shared<torch::optim::SGD>(net->parameters(),
                                              torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  /// One step. `at`: called before the forward (0), the backward (1) and the step (2).
  void run(const std::function<void(int)>& at) {
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    auto window = accelerator.accumulate(net);
    const Tensor x = torch::ones({32, 64}, test_device());
    at(0);
    const Tensor loss = net->forward(x).square().sum();
    at(1);
    accelerator.backward(loss, 32);
    at(2);
    optimizer.step();
  }
  Accelerator accelerator;
  torch::nn::Sequential net;
  std::shared_ptr<torch::optim::SGD> sgd;
};

TEST(DeviceMemory, AShortageInBackwardAndInTheOptimizerIsNamed) {
  for (const auto& [place, name] :
       {std::pair(1, "ran out in backward"), std::pair(2, "ran out in the optimizer")}) {
    detail::plan_memory(7 << 20);
    Loop loop;
    std::string text;
    try {
      loop.run([&, place = place](int at) { limit_to(at == place ? live() + 100 : 0); });
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::out_of_memory);
      text = error.what();
    }
    detail::plan_memory(0);
    limit_to(0);
    for (const char* part :
         {name, "memory of test_device:0", "Tried to allocate ", " left: ", "planned: 7.0 MiB"}) {
      EXPECT_PRED_FORMAT2(IsSubstring, part, text);
    }
  }
}

static std::vector<RankReport> spawn_two(const std::string& function) {
  return testing_support::spawn(2, function, {}, {.deadline = std::chrono::seconds(100)});
}

static void run_short(testing_support::FaultRank& rank, Strategy strategy, int place) {
  Loop loop(device_world(rank.world(), 0), strategy);
  std::string text;
  try {
    loop.run([&](int at) {
      if (at == place && rank.world().rank == 1) {
        limit_to(live() + 100);
      }
    });
  } catch (const std::exception& error) {
    text = error.what();
    rank.report("short", error_kind(error) == ErrorKind::out_of_memory);
  }
  limit_to(0);
  rank.report("text", text);
  take_device_errors(); // of what the failed step left
}

HASTEN_RANK_FUNCTION(ShortInForward) { run_short(rank, Strategy::ddp, 0); }
HASTEN_RANK_FUNCTION(ShortInBackward) { run_short(rank, Strategy::ddp, 1); }
HASTEN_RANK_FUNCTION(ShortInAGather) { run_short(rank, Strategy::fsdp, 0); }

TEST(DeviceMemory, AShortageOnOneRankEndsTheOtherWithItsName) {
  for (const auto& [function, name] :
       {std::pair("ShortInBackward", "memory of test_device:0 ran out in backward"),
        std::pair("ShortInAGather", "ran out in a collective, the gather of unit")}) {
    for (const RankReport& rank : spawn_two(function)) {
      EXPECT_FALSE(rank.timed_out) << function;
      EXPECT_PRED_FORMAT2(IsSubstring, name, rank.values.value("text", rank.error));
      EXPECT_TRUE(rank.values.value("short", false)) << "of this kind";
    }
  }
}

TEST(DeviceMemory, AShortageInForwardReachesTheOtherRankAsOne) {
  const auto ranks = spawn_two("ShortInForward");
  for (const RankReport& rank : ranks) {
    EXPECT_FALSE(rank.timed_out);
    EXPECT_TRUE(rank.values.value("short", false)) << rank.error;
  }
  EXPECT_PRED_FORMAT2(IsSubstring, "memory of test_device:0 ran out in the window of accumulate()",
                      ranks[0].values.value("text", ranks[0].error));
}

TEST(DeviceMemory, RanksThatShareADeviceShareItsMemory) {
  const World world{.world_size = 5, .local_rank = 1, .local_world_size = 5};
  const int count = 2; // of the test device
  EXPECT_EQ(detail::ranks_on(at::kCPU, "cpu", world), 5);
  EXPECT_EQ(detail::ranks_on(test_device(), "test_device:0", world), 5);
  EXPECT_EQ(detail::ranks_on(test_device(0), "auto", world), 3) << "ranks 0, 2, 4 of " << count;
  EXPECT_EQ(detail::ranks_on(test_device(1), "test_device", world), 2);
  limit_to(live() + 5000);
  EXPECT_EQ(memory_share(test_device(), "test_device"), live() + 4500);
  limit_to(0);
}

} // namespace hasten::device_memory_test
