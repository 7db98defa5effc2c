// Compares scopes of LocalSGD with the algorithm in torch's operators. Worlds 1 to 4.
#include "hasten/local_sgd/local_sgd.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "local_sgd/local_sgd_rig.h"
#include "support/on_device.h"
#include "support/watched_communicator.h"

namespace hasten::accelerator_test {

template <typename Optimizer, typename Options>
void expect_simulation(int64_t batch_count, int64_t k, int64_t h, int epochs,
                       const Options& options, AveragerOptions average = {}) {
  SCOPED_TRACE(testing::Message() << batch_count << " batches, accumulation " << k << ", H " << h);
  auto accelerator = local_accelerator(k);
  const auto batches = make_batches(batch_count);
  const auto simulated = simulate_local_sgd<Optimizer>(
      batches, options, accelerator.num_processes(),
      {.accumulation = k, .epochs = epochs, .h = [h](int64_t) { return h; }});
  average.slice_mb = 1e-4;
  Net net = train_local_sgd<Optimizer>(accelerator, batches, options, epochs,
                                       {.local_sgd_steps = h, .average = average});
  EXPECT_LE(largest_difference(*net, *simulated[0]->net), 1e-10);
  expect_equal_on_ranks(accelerator, net);
  accelerator.end_training();
}

// Even and uneven numbers of batches. Some ranks have none in some or in all windows. Also
// accumulation, an H that divides an epoch and an H that does not.
TEST(LocalSGD, RanksEqualTheAlgorithmInTorchsOperators) {
  const auto sgd = torch::optim::SGDOptions(0.3).momentum(0.9);
  const auto adamw = torch::optim::AdamWOptions(0.02);
  expect_simulation<torch::optim::SGD>(24, 1, 3, 2, sgd);
  expect_simulation<torch::optim::SGD>(24, 2, 4, 3, sgd);
  expect_simulation<torch::optim::SGD>(13, 1, 2, 3, sgd);
  expect_simulation<torch::optim::SGD>(7, 2, 3, 4, sgd);
  expect_simulation<torch::optim::SGD>(1, 1, 2, 5, sgd);
  expect_simulation<torch::optim::AdamW>(24, 1, 4, 2, adamw);
  expect_simulation<torch::optim::AdamW>(15, 3, 2, 3, adamw);
  expect_simulation<torch::optim::AdamW>(13, 1, 2, 3, adamw, {.transactional = false});
}

template <typename Optimizer, typename Options>
Net train_ddp(Accelerator& accelerator, const std::vector<Pair>& batches, const Options& options,
              std::optional<LocalSGDOptions> local) {
  if (local) {
    return train_local_sgd<Optimizer>(accelerator, batches, options, 1, *local);
  }
  Net net = net_of_seed(static_cast<uint64_t>(accelerator.process_index()) + 1);
  Optimizer inner(net->parameters(), options);
  Decay decay(inner);
  auto range = batches;
  auto [scheduler, model, loader, optimizer] = accelerator.prepare(decay, net, range, inner);
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    accelerator.clip_grad_norm_(model, 0.2);
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
  }
  return net;
}

TEST(LocalSGD, DisabledOrAloneItIsPlainTraining) {
  const auto options = torch::optim::SGDOptions(0.3).momentum(0.9);
  auto accelerator = local_accelerator();
  const bool alone = accelerator.num_processes() == 1;
  const auto batches = make_batches(11);
  auto plain_accelerator = local_accelerator();
  Net plain = train_ddp<torch::optim::SGD>(plain_accelerator, batches, options, std::nullopt);
  Net net = train_ddp<torch::optim::SGD>(accelerator, batches, options,
                                         LocalSGDOptions{.local_sgd_steps = 3, .enabled = alone});
  EXPECT_EQ(largest_difference(*net, *plain), 0);
  accelerator.end_training();
  plain_accelerator.end_training();
}

// Batches of one size, because DDP weights samples and an average of parameters weights ranks.
TEST(LocalSGD, WithHOneAndPlainSgdItIsDdp) {
  for (const int64_t steps : {1, 10}) {
    auto accelerator = local_accelerator();
    auto plain_accelerator = local_accelerator();
    std::vector<Pair> batches;
    for (int64_t i = 0; i < steps * accelerator.num_processes(); ++i) {
      batches.push_back(make_batches(2)[1]);
      batches.back().first = batches.back().first + static_cast<double>(i) / 10;
    }
    const auto rate = torch::optim::SGDOptions(0.05);
    const auto train = [&](Accelerator& on, bool local) {
      Net net = net_of_seed(1);
      torch::optim::SGD inner(net->parameters(), rate);
      auto [model, optimizer, loader] = on.prepare(net, inner, batches);
      LocalSGD scope(on, model, {.local_sgd_steps = 1, .enabled = local});
      for (const auto& batch : loader) {
        auto window = on.accumulate(model);
        on.backward(mean_loss(model, batch));
        optimizer.step();
        optimizer.zero_grad();
        EXPECT_EQ(scope.step(), scope.active());
      }
      scope.finish();
      return net;
    };
    Net local = train(accelerator, true);
    Net ddp = train(plain_accelerator, false);
    for (size_t p = 0; p < local->parameters().size(); ++p) {
      const Tensor a = local->parameters()[p];
      const Tensor b = ddp->parameters()[p];
      const double tolerance = steps == 1 ? 2 * 2.3e-16 : 1e-6;
      EXPECT_LE(((a - b).abs() / b.abs().clamp_min(0.05)).max().item<double>(), tolerance) << steps;
    }
    accelerator.end_training();
    plain_accelerator.end_training();
  }
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    linear = register_module("linear", torch::nn::Linear(3, 1));
    marks = register_buffer("marks", on_device::zeros({2}, torch::kLong));
  }
  Tensor forward(const Tensor& x) { return linear(norm(x)).mean(); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
  Tensor marks;
};
TORCH_MODULE(Normed);

TEST(LocalSGD, StatisticsArePooledAndIntegersAreRankZeros) {
  auto accelerator = local_accelerator();
  const int world = accelerator.num_processes();
  Normed net;
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2});
  const auto rows_of = [](int rank) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(40 + rank);
    return on_device::randn({64, 3}, generator) * (rank + 1) + 3 * rank;
  };
  net->marks.fill_(10 + accelerator.process_index());
  for (int step = 0; step < 2; ++step) {
    accelerator.backward(model->forward(rows_of(accelerator.process_index())));
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_EQ(local_sgd.step(), step == 1 && world > 1);
  }
  if (world > 1) {
    Tensor means = on_device::zeros({3}, torch::kDouble);
    Tensor seconds = on_device::zeros({3}, torch::kDouble);
    for (int rank = 0; rank < world; ++rank) {
      auto own = on_device::moved(torch::nn::BatchNorm1d(3));
      own->forward(rows_of(rank));
      own->forward(rows_of(rank));
      const Tensor mean = own->running_mean.to(torch::kDouble);
      means += mean / world;
      seconds += (own->running_var.to(torch::kDouble) + mean.square()) / world;
    }
    EXPECT_LT((net->norm->running_mean - means).abs().max().item<double>(), 1e-6);
    EXPECT_LT((net->norm->running_var - (seconds - means.square())).abs().max().item<double>(),
              1e-5);
    EXPECT_EQ(net->marks[1].item<int64_t>(), 10);
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 2);
  }
  local_sgd.finish();
  accelerator.end_training();
}

// One rank's step is skipped. The scope counts it, too.
TEST(LocalSGD, AStepThatIsSkippedIsCounted) {
  AcceleratorOptions options;
  options.seed.reset();
  options.skip_non_finite_steps = true;
  Accelerator accelerator(options, testing_support::fresh_communicator());
  Net net = net_of_seed(1);
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 3});
  const Pair batch = make_batches(2)[1];
  int averages = 0;
  for (int step = 0; step < 7; ++step) {
    const bool bad = step == 1 && accelerator.process_index() == 0;
    accelerator.backward(mean_loss(model, batch) * (bad ? INFINITY : 1.0));
    EXPECT_EQ(optimizer.step().was_skipped(), bad);
    optimizer.zero_grad();
    averages += local_sgd.step();
    EXPECT_FALSE(local_sgd.step()) << "one count a step";
  }
  EXPECT_EQ(averages, local_sgd.active() ? 2 : 0);
  local_sgd.finish();
  if (accelerator.num_processes() > 1) {
    EXPECT_EQ(local_sgd.report().steps, 7);
    EXPECT_EQ(local_sgd.report().rounds, 3);
  }
  expect_equal_on_ranks(accelerator, net);
  accelerator.end_training();
}

// Over two passes of uneven data: H is 4, a pass has 5 steps.
TEST(LocalSGD, NothingIsSentBetweenTwoSynchronisations) {
  auto watched =
      std::make_shared<testing_support::WatchedCommunicator>(testing_support::fresh_communicator());
  int sent = 0;
  watched->before = [&sent](std::string_view) { ++sent; };
  AcceleratorOptions options;
  options.seed.reset();
  Accelerator accelerator(options, watched);
  auto batches = make_batches(4 * accelerator.num_processes() + 1);
  Net net = net_of_seed(1);
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, inner, batches);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 4});
  sent = 0;
  int turn = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
      ++turn;
      EXPECT_EQ(sent, 0) << turn;
      const bool averaged = local_sgd.step();
      EXPECT_EQ(averaged, accelerator.num_processes() > 1 && turn % 4 == 0);
      EXPECT_EQ(std::exchange(sent, 0) > 0, averaged);
    }
  }
  EXPECT_EQ(turn, 10);
  local_sgd.finish();
  expect_equal_on_ranks(accelerator, net);
  accelerator.end_training();
}

TEST(LocalSGD, PlainTrainingGoesOnBehindIt) {
  auto accelerator = local_accelerator();
  const auto batches = make_batches(9); // uneven
  Net net = net_of_seed(1);
  torch::optim::AdamW inner(net->parameters(), 0.02);
  auto range = batches;
  auto [model, loader, optimizer] = accelerator.prepare(net, range, inner);
  for (int epoch = 0; epoch < 4; ++epoch) {
    LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2, .enabled = epoch % 2 == 0});
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
      local_sgd.step();
    }
    local_sgd.finish();
    expect_equal_on_ranks(accelerator,
                          net); // if the moments differed, DDP would diverge
  }
  accelerator.end_training();
}

TEST(LocalSGD, ReportsItsRounds) {
  auto accelerator = local_accelerator();
  Net net = net_of_seed(1);
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2});
  const auto batches = make_batches(16);
  for (int step = 0; step < 4; ++step) {
    accelerator.backward(
        mean_loss(model, batches[static_cast<size_t>(4 * step + accelerator.process_index() % 4)]));
    optimizer.step();
    optimizer.zero_grad();
    local_sgd.step();
  }
  const LocalSGDReport report = local_sgd.report();
  if (accelerator.num_processes() > 1) {
    const int64_t world = accelerator.num_processes();
    EXPECT_EQ(report.steps, 4);
    EXPECT_EQ(report.rounds, 2);
    EXPECT_GT(report.last.spread, 0);
    EXPECT_EQ(report.last.bytes, 2 * (world - 1) * (48 + 27) * 8 / world);
    EXPECT_EQ(report.bytes, 2 * report.last.bytes);
    EXPECT_GT(report.communication_share, 0);
    EXPECT_LT(report.communication_share, 1);
  }
  local_sgd.finish();
  local_sgd.finish(); // the second call does nothing
  accelerator.end_training();
}

// The ranks move one parameter in different directions, by a share that doubles in each round or
// stays the same. The mean over ranks does not change.
TEST(LocalSGD, ASpreadThatGrowsFromRoundToRoundIsAWarning) {
  for (const double growth : {2.0, 1.0}) {
    auto accelerator = local_accelerator();
    const int world = accelerator.num_processes();
    std::string lines;
    set_log_sink([&](LogLevel level, std::string_view line) {
      lines += level == LogLevel::warning ? std::string(line) + "\n" : "";
    });
    struct Point : torch::nn::Module {
      Point() { w = register_parameter("w", on_device::full({10}, 5.0, torch::kDouble)); }
      Tensor w;
    };
    auto point = std::make_shared<Point>();
    torch::optim::SGD inner(point->parameters(), 0.01);
    auto [model, optimizer] = accelerator.prepare(point, inner);
    LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2});
    double pull = accelerator.process_index() - (world - 1) / 2.0;
    for (int round = 0; round < 9; ++round) {
      for (int step = 0; step < 2; ++step) {
        accelerator.backward((point->w * pull).mean());
        optimizer.step();
        optimizer.zero_grad();
        local_sgd.step();
      }
      pull *= growth;
    }
    local_sgd.finish();
    set_log_sink({});
    const std::string text = "local sgd: the ranks diverge";
    const size_t first = lines.find(text);
    EXPECT_EQ(first != std::string::npos, growth > 1 && world > 1 && accelerator.is_main_process())
        << lines;
    if (first != std::string::npos) { // the warning comes once
      EXPECT_EQ(lines.find(text, first + 1), std::string::npos);
      EXPECT_NE(lines.find("(local_sgd_steps=2 now)"), std::string::npos);
    }
    accelerator.end_training();
  }
}

// Notes: V_K = a^2 s^2 / M (1 - q^K) / (1 - q) / (1 - q^K / M - (1 - 1 / M)
// (1 - a)^(2K)), q = (1 - a)^2 + a^2 b^2. V_K is the stationary mean square of the average. A wrong
// divisor or period is far outside of the sampling error of 20000 independent problems.
TEST(LocalSGD, StationaryVarianceIsTheClosedForm) {
  const double a = 0.2;
  const double beta = 0.8;
  const double sigma = 1.0;
  for (const int64_t period : {1, 4, 16}) {
    auto accelerator = local_accelerator();
    const double m = accelerator.num_processes();
    struct Points : torch::nn::Module {
      Points() { w = register_parameter("w", on_device::zeros({20000}, torch::kDouble)); }
      Tensor w;
    };
    auto points = std::make_shared<Points>();
    torch::optim::SGD inner(points->parameters(), a);
    auto [model, optimizer] = accelerator.prepare(points, inner);
    LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = period});
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(900 + accelerator.process_index());
    double mean_square = 0;
    int64_t samples = 0;
    for (int step = 1; step <= 96; ++step) {
      const Tensor xi = on_device::randn({20000}, generator, torch::kDouble);
      const Tensor zeta = on_device::randn({20000}, generator, torch::kDouble);
      // Its gradient is w + beta w xi + sigma zeta.
      const Tensor gradient = points->w.detach() * (1 + beta * xi) + sigma * zeta;
      accelerator.backward((points->w * gradient).sum());
      optimizer.step();
      optimizer.zero_grad();
      local_sgd.step();
      if (step % period == 0 && step >= 48) {
        mean_square += points->w.detach().square().mean().item<double>();
        ++samples;
      }
    }
    mean_square /= static_cast<double>(samples);
    const double q = (1 - a) * (1 - a) + a * a * beta * beta;
    const double qk = std::pow(q, period);
    const double expected = a * a * sigma * sigma / m * (1 - qk) / (1 - q) /
                            (1 - qk / m - (1 - 1 / m) * std::pow(1 - a, 2 * period));
    EXPECT_NEAR(mean_square / expected, 1, 0.035) << "K=" << period << ", M=" << m;
    local_sgd.finish();
    accelerator.end_training();
  }
}

} // namespace hasten::accelerator_test
