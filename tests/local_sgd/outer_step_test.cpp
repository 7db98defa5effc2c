// Outer steps compared with their algorithms in torch's operators.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/local_sgd/averager.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::outer_step_test {

using at::Tensor;
using testing_support::fresh_communicator;

// The changes of local training in a round, by rank.
Tensor change(int rank, int round) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(100 + 10 * round + rank);
  return on_device::randn({40, 5}, generator, torch::kDouble) * 0.1;
}

struct Rounds {
  Rounds(std::shared_ptr<Communicator> group, std::shared_ptr<OuterStep> outer, double lr = 0.25)
      : communicator(std::move(group)),
        averager(communicator, {{"p", parameter}}, {.slice_mb = 0.0002, .outer = std::move(outer)}),
        lr(lr) {}
  void run(int from, int to) {
    for (int round = from; round < to; ++round) {
      parameter.add_(change(communicator->rank(), round));
      averager.average(1, lr);
    }
  }
  std::shared_ptr<Communicator> communicator;
  Tensor parameter = on_device::ones({40, 5}, torch::kDouble);
  Averager averager;
  double lr;
};

// `step(anchor, delta)` gives the next anchor.
template <typename Step>
Tensor plain_rounds(int world, int rounds, const Step& step) {
  Tensor anchor = on_device::ones({40, 5}, torch::kDouble);
  for (int round = 0; round < rounds; ++round) {
    Tensor delta = torch::zeros_like(anchor);
    for (int rank = 0; rank < world; ++rank) {
      delta -= change(rank, round) / world;
    }
    anchor = step(anchor, delta);
  }
  return anchor;
}

void expect_near(const Tensor& a, const Tensor& b) {
  EXPECT_LT((a - b).abs().max().item<double>(), 1e-12);
}

TEST(OuterStep, DiLoCoIsNesterovOnTheRanksMeanChange) {
  for (const bool nesterov : {true, false}) {
    Rounds ours(fresh_communicator(), std::make_shared<DiLoCo>(DiLoCoOptions{
                                          .lr = 0.7, .momentum = 0.9, .nesterov = nesterov}));
    ours.run(0, 4);
    Tensor velocity;
    expect_near(ours.parameter,
                plain_rounds(ours.communicator->world_size(), 4,
                             [&](const Tensor& anchor, const Tensor& delta) {
                               velocity =
                                   velocity.defined() ? 0.9 * velocity + delta : delta.clone();
                               return anchor - 0.7 * (nesterov ? delta + 0.9 * velocity : velocity);
                             }));
  }
}

TEST(OuterStep, SlowMoIsItsAlgorithm) {
  Rounds ours(fresh_communicator(), std::make_shared<SlowMo>(SlowMoOptions{.slowmo_factor = 0.6}));
  ours.run(0, 4);
  Tensor slow = on_device::zeros({40, 5}, torch::kDouble);
  expect_near(ours.parameter, plain_rounds(ours.communicator->world_size(), 4,
                                           [&](const Tensor& anchor, const Tensor& delta) {
                                             slow = 0.6 * slow + delta / 0.25;
                                             return anchor - 1.0 * 0.25 * slow;
                                           }));
}

TEST(OuterStep, AnyOptimizerStepsOnTheChange) {
  const auto make = [](std::vector<Tensor> parameters) {
    return std::make_shared<torch::optim::Adam>(parameters,
                                                torch::optim::AdamOptions(0.1).eps(1e-3));
  };
  Rounds ours(fresh_communicator(), std::make_shared<OuterOptimizer>(make, "adam 0.1"));
  ours.run(0, 4);
  Tensor parameter = on_device::ones({40, 5}, torch::kDouble);
  torch::optim::Adam adam({parameter}, torch::optim::AdamOptions(0.1).eps(1e-3));
  plain_rounds(ours.communicator->world_size(), 4, [&](const Tensor&, const Tensor& delta) {
    parameter.mutable_grad() = delta;
    adam.step();
    return parameter;
  });
  expect_near(ours.parameter, parameter);
}

// SyncStrategy::driver gives the parameters of an all-reduce.
TEST(OuterStep, ADriversRoundsAreThoseOfAnAllReduce) {
  const auto communicator = fresh_communicator();
  for (const bool outer : {false, true}) {
    const auto rounds = [&](SyncStrategy sync) {
      Tensor parameter = on_device::ones({40, 5}, torch::kDouble);
      AveragerOptions options;
      options.slice_mb = 0.0002;
      options.sync = sync;
      if (outer) {
        options.outer = std::make_shared<DiLoCo>();
      }
      Averager averager(communicator, {{"p", parameter}}, options);
      for (int round = 0; round < 3; ++round) {
        parameter.add_(change(communicator->rank(), round));
        averager.average(communicator->rank() + 1);
      }
      const int64_t world = communicator->world_size();
      if (sync == SyncStrategy::driver) {
        EXPECT_EQ(averager.report().bytes,
                  (communicator->rank() == 0 ? world - 1 : 1) * (world > 1 ? 1600 : 0));
      }
      return parameter;
    };
    expect_near(rounds(SyncStrategy::driver), rounds(SyncStrategy::all_reduce));
  }
}

// Special cases that are equal bit for bit.
TEST(OuterStep, DiLoCoWithRateOneAndNoMomentumIsPlainAveraging) {
  const auto communicator = fresh_communicator();
  Rounds outer(communicator, std::make_shared<DiLoCo>(DiLoCoOptions{.lr = 1, .momentum = 0}));
  Rounds plain(communicator, nullptr);
  outer.run(0, 3);
  plain.run(0, 3);
  EXPECT_TRUE(torch::equal(outer.parameter, plain.parameter));
}

TEST(OuterStep, StateGoesOnWhereItWas) {
  const auto make_adam = [](std::vector<Tensor> parameters) {
    return std::make_shared<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.1));
  };
  const auto communicator = fresh_communicator();
  const std::vector<std::function<std::shared_ptr<OuterStep>()>> kinds{
      [] { return std::make_shared<DiLoCo>(); }, [] { return std::make_shared<SlowMo>(); },
      [&] { return std::make_shared<OuterOptimizer>(make_adam, "adam"); }};
  for (const auto& kind : kinds) {
    Rounds whole(communicator, kind());
    whole.run(0, 2);
    NamedTensors tensors;
    nlohmann::json values;
    whole.averager.save_state(tensors, values);
    for (auto& [name, tensor] : tensors) {
      tensor = tensor.clone();
    }
    Rounds resumed(communicator, kind());
    resumed.parameter.copy_(whole.parameter);
    resumed.averager.load_state(tensors, nlohmann::json::parse(values.dump()));
    whole.run(2, 4);
    resumed.run(2, 4);
    EXPECT_TRUE(torch::equal(whole.parameter, resumed.parameter)) << kind()->description();
    EXPECT_THROW(Rounds(communicator, nullptr).averager.load_state(tensors, values), InputError);
  }
}

TEST(OuterStep, OptionsOutOfRangeAreRefused) {
  EXPECT_THROW(DiLoCo({.lr = 0}), InputError);
  EXPECT_THROW(DiLoCo({.momentum = 1}), InputError);
  EXPECT_THROW(SlowMo({.slowmo_factor = -0.1}), InputError);
  EXPECT_THROW(OuterOptimizer({}, "none"), InputError);
  Rounds zero_rate(fresh_communicator(), std::make_shared<SlowMo>(), 0);
  EXPECT_THROW(zero_rate.run(0, 1), InputError);
}

} // namespace hasten::outer_step_test
