// An averager with compressed messages. It sends the changes since the last round. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/local_sgd/averager.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::int8_hook_test {

using at::Tensor;

// In each block of 256 one element changes by 1 and the others by a thousandth, which is an eighth
// of the resolution of eight bits in this block.
Tensor change(int rank, int world) {
  Tensor numbers = on_device::full({1000}, 0.001);
  numbers.slice(0, 0, 1000, 256).fill_(1.0);
  return numbers * (2.0 * (rank + 1) / (world + 1)); // the ranks' mean: 1 x
}

struct Rounds {
  Rounds(std::shared_ptr<Communicator> group, std::shared_ptr<CommHook> hook)
      : communicator(std::move(group)),
        averager(communicator, {{"p", parameter}, {"q", other}}, {.comm_hook = std::move(hook)}) {}
  void run(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      parameter.add_(change(communicator->rank(), communicator->world_size()));
      other.add_(communicator->rank());
      averager.average();
    }
  }
  double error(int rounds) const {
    const Tensor wanted = change(0, 1) * static_cast<double>(rounds);
    return (parameter - wanted).abs().max().item<double>();
  }
  std::shared_ptr<Communicator> communicator;
  Tensor parameter = on_device::zeros({1000});
  Tensor other = on_device::zeros({3}, torch::kDouble);
  Averager averager;
};

TEST(Int8Hook, ErrorFeedbackLosesNothingOverRounds) {
  const auto communicator = testing_support::fresh_communicator();
  const int world = communicator->world_size();
  if (world == 1) {
    return;
  }
  Rounds with(communicator, std::make_shared<Int8CompressHook>());
  Rounds without(communicator, std::make_shared<Int8CompressHook>(false));
  Rounds sixteen(communicator, std::make_shared<Bf16CompressHook>());
  with.run(40);
  without.run(40);
  sixteen.run(40);
  EXPECT_LT(with.error(40), 0.02); // two roundings of one round
  EXPECT_GT(without.error(40), 0.035); // small changes are lost
  EXPECT_LT(sixteen.error(40),
            0.2); // values are near 40; the rounding error is 2^-8 of them at most
  // fp64 uses the plain all-reduce.
  EXPECT_NEAR(with.other[0].item<double>(), 40 * (world - 1) / 2.0, 1e-12);
  for (const Rounds* rounds : {&with, &without, &sixteen}) {
    Tensor first = rounds->parameter.clone();
    communicator->broadcast(first, 0, "rank 0's");
    EXPECT_TRUE(torch::equal(first, rounds->parameter));
  }
  EXPECT_LT(with.averager.report().bytes, 2.0 * (world - 1) / world * (1000 * 1.02 + 3 * 8) + 1);
}

TEST(Int8Hook, ErrorsAreStateAndGoOnBitForBit) {
  const auto communicator = testing_support::fresh_communicator();
  Rounds whole(communicator, std::make_shared<Int8CompressHook>());
  whole.run(3);
  NamedTensors tensors;
  nlohmann::json values;
  whole.averager.save_state(tensors, values);
  for (auto& [name, tensor] : tensors) {
    tensor = tensor.clone();
  }
  Rounds resumed(communicator, std::make_shared<Int8CompressHook>());
  resumed.parameter.copy_(whole.parameter);
  resumed.other.copy_(whole.other);
  resumed.averager.load_state(tensors, values);
  whole.run(3);
  resumed.run(3);
  EXPECT_TRUE(torch::equal(whole.parameter, resumed.parameter));
}

TEST(Int8Hook, ANumberThatIsNotFiniteIsSeenAndForgotten) {
  const auto communicator = testing_support::fresh_communicator();
  if (communicator->world_size() == 1) {
    return;
  }
  Int8CompressHook hook;
  const auto reduce = [&](double value) {
    Tensor buffer = on_device::full({600}, 1.0);
    buffer[300].fill_(communicator->rank() == 0 ? value : 1.0);
    CommHook::Step step = hook.reduce(*communicator, {0, true, buffer, {{"g", buffer}}});
    while (step()) {
    }
    return buffer;
  };
  EXPECT_FALSE(std::isfinite(reduce(INFINITY)[300].item<double>()));
  EXPECT_FALSE(std::isfinite(reduce(NAN)[300].item<double>()));
  EXPECT_NEAR(reduce(1)[300].item<double>(), communicator->world_size(), 0.1);
}

Tensor reduce_bucket(Int8CompressHook& hook, Communicator& communicator, int64_t index,
                     const std::vector<std::string>& names, Tensor buffer) {
  GradientBucket bucket{index, true, buffer, {}};
  const int64_t each = buffer.numel() / std::ssize(names);
  for (size_t i = 0; i < names.size(); ++i) {
    bucket.gradients.push_back({names[i], buffer.narrow(0, static_cast<int64_t>(i) * each, each)});
  }
  CommHook::Step step = hook.reduce(communicator, bucket);
  while (step()) {
  }
  return buffer;
}

// When the order is learned, buckets get other gradients, once.
TEST(Int8Hook, WhatOneGradientLostIsNotAddedToAnother) {
  const auto communicator = testing_support::fresh_communicator();
  Int8CompressHook hook;
  const auto lossy = on_device::linspace(0.001, 1, 600);
  reduce_bucket(hook, *communicator, 0, {"a", "b"}, lossy.clone());
  const Tensor zeros = on_device::zeros({600});
  EXPECT_GT(
      reduce_bucket(hook, *communicator, 0, {"a", "b"}, zeros.clone()).abs().max().item<double>(),
      0)
      << "the same gradients get it";
  reduce_bucket(hook, *communicator, 0, {"a", "b"}, lossy.clone());
  EXPECT_EQ(
      reduce_bucket(hook, *communicator, 0, {"a", "c"}, zeros.clone()).abs().max().item<double>(),
      0);
}

TEST(Int8Hook, NamesThatLookAlikeShareNothing) {
  const auto communicator = testing_support::fresh_communicator();
  Int8CompressHook hook, plain;
  for (int turn = 0; turn < 3; ++turn) {
    for (const int64_t index : {0, 1}) {
      const auto values = on_device::linspace(0.001, 1 + turn, 500 + 300 * index);
      EXPECT_TRUE(torch::equal(
          reduce_bucket(hook, *communicator, index, {index == 0 ? "x" : "x.sum"}, values.clone()),
          reduce_bucket(plain, *communicator, index, {index == 0 ? "one" : "two"}, values.clone())))
          << turn << ", " << index;
    }
  }
}

// Below 127 times the smallest number the scale is rounded, by half at most.
TEST(Int8Hook, SubnormalNumbersStayInEightBits) {
  const auto communicator = testing_support::fresh_communicator();
  if (communicator->world_size() == 1) {
    return;
  }
  Int8CompressHook hook;
  const float least = std::numeric_limits<float>::denorm_min();
  const Tensor sum =
      reduce_bucket(hook, *communicator, 0, {"g"}, on_device::full({256}, 190 * least));
  const float all = static_cast<float>(communicator->world_size()) * least;
  EXPECT_GE(sum.min().item<float>(), 127 * all);
  EXPECT_LE(sum.max().item<float>(), 190 * all);
}

} // namespace hasten::int8_hook_test
