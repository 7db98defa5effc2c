// Compares policies of LocalSGD with the algorithm in torch's operators, and with trajectories that
// Python made. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/optim/adamw.h"
#include "local_sgd/local_sgd_golden.h"
#include "local_sgd/local_sgd_rig.h"
#include "support/on_device.h"
#include "support/watched_communicator.h"

namespace hasten::accelerator_test {

// 24 batches are even on every world. 22 batches are uneven on worlds of 3 and 4.
void expect_policy(const Simulation& how, const LocalSGDOptions& options, double tolerance) {
  const auto rate = torch::optim::SGDOptions(0.3).momentum(0.9);
  for (const int64_t count : {24, 22}) {
    SCOPED_TRACE(testing::Message() << count << " batches");
    auto accelerator = local_accelerator(how.accumulation);
    if (accelerator.num_processes() == 1) {
      return;
    }
    const auto batches = make_batches(count);
    const auto simulated =
        simulate_local_sgd<torch::optim::SGD>(batches, rate, accelerator.num_processes(), how);
    Net net = train_local_sgd<torch::optim::SGD>(accelerator, batches, rate, how.epochs, options);
    EXPECT_LE(largest_difference(*net, *simulated[0]->net), tolerance);
    expect_equal_on_ranks(accelerator, net);
    accelerator.end_training();
  }
}

TEST(LocalSGDPolicy, HFollowsItsSchedule) {
  const auto h = [](int64_t step) { return step < 4 ? 1 : step < 10 ? 2 : 5; };
  expect_policy({.epochs = 3, .h = h}, {.schedule = h}, 1e-10);
}

TEST(LocalSGDPolicy, PostLocalBeginsWithPlainTraining) {
  const auto h = [](int64_t) { return 3; };
  for (const int64_t start : {1, 5, 8}) { // 8: in the second epoch
    expect_policy({.accumulation = 2, .epochs = 3, .h = h, .start = start},
                  {.local_sgd_steps = 3, .post_local_start = start}, 1e-10);
  }
}

TEST(LocalSGDPolicy, SamplesWeighRanks) {
  const auto h = [](int64_t) { return 2; };
  expect_policy({.accumulation = 2, .epochs = 3, .h = h, .by_rows = true},
                {.local_sgd_steps = 2, .weigh_by_samples = true}, 1e-10);
}

// A later correction keeps the steps that were made in between. The data is even, because a rank
// without batches would be corrected at another step.
TEST(LocalSGDPolicy, DelayedAveragesCorrectLater) {
  const std::vector<std::pair<int64_t, std::optional<double>>> cases{
      {1, std::nullopt}, {3, std::nullopt}, {4, std::nullopt}, {2, 0}, {3, 0.5}};
  for (const auto& [delay, alpha] : cases) {
    auto accelerator = local_accelerator();
    if (accelerator.num_processes() == 1) {
      return;
    }
    const auto rate = torch::optim::SGDOptions(0.3).momentum(0.9);
    const auto batches = make_batches(24);
    const auto simulated = simulate_local_sgd<torch::optim::SGD>(
        batches, rate, accelerator.num_processes(),
        {.epochs = 3, .h = [](int64_t) { return 4; }, .delay = delay, .alpha = alpha});
    Net net = train_local_sgd<torch::optim::SGD>(
        accelerator, batches, rate, 3,
        {.local_sgd_steps = 4, .delay = delay, .average = {.alpha = alpha}});
    EXPECT_LE(largest_difference(*net, *simulated[0]->net), 1e-10) << delay;
    expect_equal_on_ranks(accelerator, net);
    accelerator.end_training();
  }
}

// Rank 0 calls the other collective after it has begun the average, the others before they send
// their first slice: where one waits for the other, neither ends.
TEST(LocalSGDPolicy, OtherCollectivesDoNotWaitForADelayedAverage) {
  auto watched =
      std::make_shared<testing_support::WatchedCommunicator>(testing_support::fresh_communicator());
  const int world = watched->world_size();
  if (world == 1) {
    return;
  }
  AcceleratorOptions options;
  options.seed.reset();
  std::function<void()> once{};
  watched->before = [&once](std::string_view name) {
    if (once && name == "average slice 0") {
      std::exchange(once, nullptr)();
    }
  };
  Accelerator accelerator(options, watched);
  Net net = net_of_seed(1);
  torch::optim::SGD inner(net->parameters(), 0.3);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD scope(accelerator, model, {.local_sgd_steps = 1, .delay = 1});
  const auto step = [&, &model = model, &optimizer = optimizer] {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, make_batches(1)[0]), 1);
    optimizer.step();
    optimizer.zero_grad();
    scope.step(); // ends an average and begins one
  };
  const auto other = [&] {
    const at::Tensor ranks = torch::ones({1}, accelerator.device());
    watched->all_reduce(ranks, ReduceOp::SUM, "another");
    EXPECT_EQ(ranks.item<double>(), world);
  };
  step(); // Gloo compares an operation between the ranks when it is new
  if (accelerator.process_index() != 0) {
    once = other;
  }
  step();
  EXPECT_FALSE(once);
  if (accelerator.process_index() == 0) {
    other();
  }
  scope.finish();
  expect_equal_on_ranks(accelerator, net);
  accelerator.end_training();
}

// Two groups, by rank % 2. Every second step averages the groups,
// every fourth step averages all ranks.
TEST(LocalSGDPolicy, GroupsAverageMoreOftenThanAll) {
  auto accelerator = local_accelerator();
  const int world = accelerator.num_processes();
  if (world == 1) {
    return;
  }
  const auto rate = torch::optim::SGDOptions(0.3).momentum(0.9);
  const auto batches = make_batches(8 * world);
  Replicas<torch::optim::SGD> all;
  for (int rank = 0; rank < world; ++rank) {
    all.push_back(std::make_unique<Replica<torch::optim::SGD>>(rate));
  }
  for (int step = 1; step <= 8; ++step) {
    for (int rank = 0; rank < world; ++rank) {
      auto& mine = *all[static_cast<size_t>(rank)];
      const Pair rows = rows_of_window(batches, world, 1, step - 1, rank, rank + 1);
      mine.optimizer.zero_grad();
      mean_loss(mine.net, rows).backward();
      torch::nn::utils::clip_grad_norm_(mine.net->parameters(), 0.2);
      mine.optimizer.step();
      mine.decay.step();
      mine.weight += 1;
    }
    if (step % 4 == 0) {
      average_replicas(all, false);
    } else if (step % 2 == 0) {
      for (int group = 0; group < 2; ++group) {
        Replicas<torch::optim::SGD> some;
        for (int rank = group; rank < world; rank += 2) {
          some.push_back(std::move(all[static_cast<size_t>(rank)]));
        }
        average_replicas(some, false);
        for (int rank = group; rank < world; rank += 2) {
          auto& back = some[static_cast<size_t>(rank / 2)];
          back->weight = 1; // its weight in the average of all ranks
          all[static_cast<size_t>(rank)] = std::move(back);
        }
      }
    }
  }
  Net net = train_local_sgd<torch::optim::SGD>(
      accelerator, batches, rate, 1,
      {.local_sgd_steps = 4,
       .inner_steps = 2,
       .group = std::to_string(accelerator.process_index() % 2)});
  EXPECT_LE(largest_difference(*net, *all[0]->net), 1e-10);
  expect_equal_on_ranks(accelerator, net);
  accelerator.end_training();
}

// All ranks of these tests are on one host, so a group's average is the average of all ranks.
TEST(LocalSGDPolicy, WithoutANameAGroupIsAHost) {
  auto accelerator = local_accelerator();
  const int world = accelerator.num_processes();
  if (world == 1) {
    return;
  }
  Net net = net_of_seed(1);
  torch::optim::SGD inner(net->parameters(), 0.3);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 6, .inner_steps = 2});
  const auto batches = make_batches(6 * world);
  for (int step = 1; step <= 6; ++step) {
    const auto b = static_cast<size_t>((step - 1) * world + accelerator.process_index());
    accelerator.backward(mean_loss(model, batches[b]));
    optimizer.step();
    optimizer.zero_grad();
    local_sgd.step();
    if (step % 2 == 0) {
      expect_equal_on_ranks(accelerator, net);
    }
  }
  local_sgd.finish();
  EXPECT_EQ(local_sgd.report().inner_rounds, 2);
  EXPECT_EQ(local_sgd.report().rounds, 1);
  accelerator.end_training();
}

// P fragments are averaged in turn, each every H steps. Without training in between, the result at
// the end equals that of averaging the whole model.
TEST(LocalSGDPolicy, FragmentsHaveTurnsWithinAPeriod) {
  auto accelerator = local_accelerator();
  if (accelerator.num_processes() == 1) {
    return;
  }
  Net net = net_of_seed(1);
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 4, .average = {.fragments = 2}});
  const auto batches = make_batches(32);
  const auto equal = [&] { // which parameters equal rank 0's
    std::vector<bool> all;
    for (const auto& parameter : net->parameters()) {
      Tensor first = parameter.detach().clone();
      accelerator.communicator()->broadcast(first, 0, "rank 0's");
      const Tensor same = torch::tensor(torch::equal(first, parameter) ? 1 : 0, torch::kLong);
      accelerator.communicator()->all_reduce(same, ReduceOp::MIN, "same");
      all.push_back(same.item<int64_t>() == 1);
    }
    return all;
  };
  // first.weight 40, first.bias 8, second.weight 24, second.bias 3: two parts.
  const std::vector<std::vector<bool>> wanted{{false, false, false, false},
                                              {true, false, false, false},
                                              {false, false, false, false},
                                              {false, true, true, true}};
  for (int64_t step = 0; step < 8; ++step) {
    accelerator.backward(mean_loss(
        model, batches[static_cast<size_t>(4 * (step % 8) + accelerator.process_index())]));
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_EQ(local_sgd.step(), step % 2 == 1);
    EXPECT_EQ(equal(), wanted[static_cast<size_t>(step % 4)]) << step;
  }
  local_sgd.finish();
  expect_equal_on_ranks(accelerator, net);
  accelerator.end_training();
}

TEST(LocalSGDPolicy, MomentsCanBeAveragedInEveryRound) {
  for (const bool average : {false, true}) {
    auto accelerator = local_accelerator();
    if (accelerator.num_processes() == 1) {
      return;
    }
    Net net = net_of_seed(1);
    torch::optim::AdamW inner(net->parameters(), 0.02);
    auto [model, optimizer] = accelerator.prepare(net, inner);
    LocalSGD local_sgd(
        accelerator, model,
        {.local_sgd_steps = 2, .moments = average ? MomentPolicy::average : MomentPolicy::keep});
    const auto batches = make_batches(16);
    for (size_t step = 0; step < 4; ++step) {
      accelerator.backward(
          mean_loss(model, batches[4 * step + static_cast<size_t>(accelerator.process_index())]));
      optimizer.step();
      optimizer.zero_grad();
      local_sgd.step();
    }
    const auto& state = static_cast<torch::optim::AdamWParamState&>(
        *inner.state().at(net->first->weight.unsafeGetTensorImpl()));
    Tensor first = state.exp_avg().clone();
    accelerator.communicator()->broadcast(first, 0, "rank 0's moments");
    EXPECT_EQ(torch::equal(first, state.exp_avg()), average || accelerator.is_main_process());
    local_sgd.finish();
    accelerator.end_training();
  }
}

// Codes cannot be averaged; their values are. The next step rounds them.
TEST(LocalSGDPolicy, MomentsOf8BitsAreAveraged) {
  auto accelerator = local_accelerator();
  Net net = net_of_seed(1);
  net->to(at::kFloat);
  AdamW8bit inner(net->parameters(), {0.02}, {.min_8bit_size = 1});
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2, .moments = MomentPolicy::average});
  const auto batches = make_batches(16);
  const auto& parameter = net->first->weight;
  for (size_t step = 0; step < 4; ++step) {
    const size_t own = 4 * step + static_cast<size_t>(accelerator.process_index());
    accelerator.backward(model->forward(batches[own].first.to(at::kFloat)).square().sum());
    optimizer.step();
    const auto& state =
        static_cast<const AdamWParamState&>(*inner.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_EQ(state.exp_avg().scalar_type(), at::kByte);
    optimizer.zero_grad();
    local_sgd.step();
    Tensor first = state.exp_avg().clone();
    accelerator.communicator()->broadcast(first, 0, "rank 0's moments");
    EXPECT_TRUE(step % 2 == 0 || torch::equal(first, state.exp_avg()));
  }
  local_sgd.finish();
  accelerator.end_training();
}

// The numbers of tools/golden/local_sgd.py.
struct GoldenNetImpl : torch::nn::Module {
  explicit GoldenNetImpl(bool normed) {
    first = register_module("first", torch::nn::Linear(4, 5));
    if (normed) {
      norm = register_module("norm", torch::nn::BatchNorm1d(5));
    }
    second = register_module("second", torch::nn::Linear(5, 1));
    to(testing_support::run_device(), torch::kDouble);
    torch::NoGradGuard no_grad;
    int64_t i = 0;
    for (auto& p : parameters()) {
      const Tensor numbers = on_device::arange(p.numel()).to(torch::kDouble);
      p.copy_((numbers + 7 * i + 1).cos().view(p.sizes()) / 2);
      ++i;
    }
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = first(x);
    return second(torch::tanh(norm ? norm(h) : h));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(GoldenNet);

Tensor golden_rows(int64_t replica, int64_t turn) {
  const int64_t count = 1 + (turn + replica) % 3;
  const int64_t start = 100 * replica + 10 * turn;
  return on_device::arange(start, start + count * 4).to(torch::kDouble).sin().view({count, 4});
}

struct GoldenCase {
  int64_t h = 1;
  int64_t accumulation = 1;
  bool uneven = false;
  bool normed = false;
};

template <typename Optimizer, typename Options>
void expect_golden(const std::vector<double>& golden, const Options& options,
                   const GoldenCase& how) {
  auto accelerator = local_accelerator(how.normed ? 1 : how.accumulation);
  if (accelerator.num_processes() != 2) {
    return;
  }
  const int64_t rank = accelerator.process_index();
  GoldenNet net(how.normed);
  Optimizer inner(net->parameters(), options);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = how.h});
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    for (int64_t step = 0; step < 5; ++step) {
      if (how.uneven && rank == 1 && step == 4) {
        continue;
      }
      const auto train = [&](const Tensor& x) {
        const Tensor y = x.sum(1, true).cos();
        auto window = accelerator.accumulate(model);
        accelerator.backward(
            torch::nn::functional::mse_loss(
                model->forward(x), y,
                torch::nn::functional::MSELossFuncOptions().reduction(torch::kSum)),
            static_cast<double>(x.size(0)));
        optimizer.step();
        optimizer.zero_grad();
        local_sgd.step();
      };
      const int64_t turn = 5 * epoch + step;
      if (how.normed) {
        train(torch::cat({golden_rows(rank, turn), golden_rows(rank, turn + 50),
                          golden_rows(rank, turn + 100)}));
        continue;
      }
      for (int64_t a = 0; a < how.accumulation; ++a) {
        train(golden_rows(rank, turn + 50 * a));
      }
    }
    if (how.uneven) {
      accelerator.join_uneven_inputs();
    }
  }
  local_sgd.finish();
  std::vector<Tensor> flat;
  for (const auto& p : net->parameters()) {
    flat.push_back(p.detach().flatten());
  }
  if (how.normed) {
    flat.push_back(net->norm->running_mean);
    flat.push_back(net->norm->running_var);
  }
  const Tensor values = torch::cat(flat);
  ASSERT_EQ(values.numel(), std::ssize(golden));
  EXPECT_LE((values - on_device::tensor(golden, torch::kDouble)).abs().max().item<double>(), 1e-10);
  accelerator.end_training();
}

TEST(LocalSGDPolicy, TrajectoriesAreThoseThatPythonMade) {
  namespace golden = local_sgd_golden;
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
  const auto adamw = torch::optim::AdamWOptions(0.02);
  using torch::optim::AdamW;
  using torch::optim::SGD;
  expect_golden<SGD>(golden::kSgdEvery1, sgd, {.h = 1});
  expect_golden<SGD>(golden::kSgdEvery3, sgd, {.h = 3});
  expect_golden<SGD>(golden::kSgdEvery4Accumulated, sgd, {.h = 4, .accumulation = 2});
  expect_golden<AdamW>(golden::kAdamWEvery3Uneven, adamw, {.h = 3, .uneven = true});
  expect_golden<AdamW>(golden::kAdamWEvery2Normed, adamw, {.h = 2, .normed = true});
}

} // namespace hasten::accelerator_test
