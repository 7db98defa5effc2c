// A window has the right batches with the weights that one process would give them, whatever the
// program does around the window. Worlds 1 to 4, fp64.
#include <cmath>

#include "accelerator/plain_steps.h"
#include "support/on_device.h"
#include "support/temporary_folder.h"

namespace hasten::accelerator_test {

// The batches of steps [first, last) of an epoch, k global batches each.
std::vector<std::vector<Pair>> steps_of(const std::vector<Pair>& batches, int world, int64_t k,
                                        int64_t first, int64_t last) {
  std::vector<std::vector<Pair>> steps;
  for (int64_t w = first; w < last; ++w) {
    steps.push_back(joined_window(batches, world, k, w));
  }
  return steps;
}

template <typename Steps>
void append(Steps& to, const Steps& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// Accelerate's sync_with_dataloader=False.
TEST(Phase, AWindowMayGoOnOverTheEndOfAPass) {
  const testing_support::TemporaryFolder folder;
  const auto train = [&](Accelerator& accelerator, Net& net, auto& batches, int saves, int loads) {
    const auto path = std::filesystem::path(
        accelerator.broadcast_object(folder.path().string()).template get<std::string>());
    torch::optim::SGD sgd(net->parameters(), 0.3);
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
    auto held_out = even_batches(2, 2);
    auto evaluation = accelerator.prepare(held_out);
    int stepped = 0;
    if (loads > 0) {
      accelerator.load_state(path / "state");
    }
    for (int epoch = loads; epoch < 3; ++epoch) {
      for (const auto& batch : loader) {
        auto window = accelerator.accumulate(model);
        accelerator.backward(mean_loss(model, batch));
        EXPECT_EQ(accelerator.sync_gradients(), optimizer.step());
        stepped += accelerator.sync_gradients();
        optimizer.zero_grad();
      }
      for (const auto& other : evaluation) { // in the middle of a window
        const torch::NoGradGuard no_grad;
        model->forward(other.first);
      }
      if (epoch + 1 == saves) {
        accelerator.save_state(path / "state");
      }
    }
    return stepped;
  };
  const AcceleratorOptions options{.gradient_accumulation_steps = 4, .sync_with_dataloader = false};
  auto accelerator = accelerator_of(options);
  const int world = accelerator.num_processes();
  auto batches = make_batches(3 * world);
  Net net = net_of_rank(accelerator);
  EXPECT_EQ(train(accelerator, net, batches, /*saves=*/1, 0), 2)
      << "of 9 global batches one is left";
  std::vector<std::vector<Pair>> steps(2);
  for (int64_t i = 0; i < 8; ++i) {
    const auto global_batch = global_batch_of(batches, world, i % 3);
    append(steps[static_cast<size_t>(i / 4)], global_batch);
  }
  const Net plain = plain_steps(steps, 0.3);
  EXPECT_LE(largest_difference(*net, *plain), 1e-10);
  accelerator.end_training(); // drops what is left

  auto resumed = accelerator_of(options);
  Net again = net_of_seed(9);
  EXPECT_EQ(train(resumed, again, batches, 0, /*loads=*/1), 2);
  EXPECT_LE(largest_difference(*again, *plain), 1e-10);
}

TEST(Phase, MicroBatchesOfTheLastBatchMayBeOneWindow) {
  for (const bool sync : {true, false}) {
    auto accelerator =
        accelerator_of({.gradient_accumulation_steps = 4, .sync_with_dataloader = sync});
    auto batches = even_batches(2 * accelerator.num_processes());
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.3);
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
    int stepped = 0;
    for (const auto& batch : loader) {
      for (int64_t row = 0; row < 4; ++row) {
        auto window = accelerator.accumulate(model);
        accelerator.backward(
            mean_loss(model, {batch.first.narrow(0, row, 1), batch.second.narrow(0, row, 1)}), 1);
        stepped += optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_EQ(stepped, sync ? 5 : 2);
  }
}

TEST(Phase, BreakAndNestedEvaluationDoNotShiftIt) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  const int world = accelerator.num_processes();
  auto batches = make_batches(5 * world);
  auto held_out = even_batches(3, 2);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  auto evaluation = accelerator.prepare(held_out);
  for (int epoch = 0; epoch < 3; ++epoch) {
    int turn = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
      int64_t rows = 0; // the inner loop begins in the middle of a window and ends by break
      for (const auto& other : evaluation) {
        torch::NoGradGuard no_grad;
        rows += accelerator.gather_for_metrics(model->forward(other.first)).size(0);
        if (epoch == 2 && rows > 2) {
          break;
        }
      }
      EXPECT_GE(rows, 2);
      if (++turn == 3 && epoch == 1) {
        break; // one batch into the second window
      }
    }
  }
  accelerator.end_training();
  auto steps = steps_of(batches, world, 2, 0, 3);
  append(steps, steps_of(batches, world, 2, 0, 1));
  append(steps, steps_of(batches, world, 2, 0, 3));
  EXPECT_LE(largest_difference(*net, *plain_steps(steps, 0.3)), 1e-10);
}

// The second loader ends and begins again in the middle of a window of the first.
TEST(Phase, ASecondLoadersEndLeavesTheFirstsWindowOpen) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 3});
  const int world = accelerator.num_processes();
  auto batches = make_batches(6 * world);
  auto few = even_batches(4 * world, 2);
  Net a = net_of_rank(accelerator), b = net_of_rank(accelerator);
  torch::optim::SGD sgd_a(a->parameters(), 0.3), sgd_b(b->parameters(), 0.1);
  auto [model_a, optimizer_a, loader_a] = accelerator.prepare(a, sgd_a, batches);
  auto [model_b, optimizer_b, loader_b] = accelerator.prepare(b, sgd_b, few);
  std::vector<std::vector<Pair>> steps_b;
  int turn = 0;
  for (const auto& batch : loader_a) {
    {
      auto window = accelerator.accumulate(loader_a, model_a);
      accelerator.backward(mean_loss(model_a, batch));
      optimizer_a.step();
      optimizer_a.zero_grad();
    }
    if (++turn % 3 == 0) {
      continue;
    }
    int inner = 0;
    for (const auto& other : loader_b) {
      auto window = accelerator.accumulate(loader_b, model_b);
      accelerator.backward(mean_loss(model_b, other));
      optimizer_b.step();
      optimizer_b.zero_grad();
      if (++inner == 2 && turn == 4) {
        break; // dropped at the next begin(), which is in a window of a
      }
    }
    append(steps_b, steps_of(few, world, 3, 0, turn == 4 ? 0 : 2));
  }
  accelerator.end_training();
  EXPECT_LE(largest_difference(*a, *plain_steps(steps_of(batches, world, 3, 0, 2), 0.3)), 1e-10);
  EXPECT_LE(largest_difference(*b, *plain_steps(steps_b, 0.1)), 1e-10);
}

// The other model's gradients continue to accumulate, as in torch. The ranks have uneven data.
TEST(Phase, AnOptimizerThatStepsEverySecondIterationGathersTwo) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(3 * world + 1);
  Net a = net_of_rank(accelerator), b = net_of_rank(accelerator);
  torch::optim::SGD sgd_a(a->parameters(), 0.3);
  torch::optim::Adam adam_b(b->parameters(), 0.01);
  auto [model_a, model_b, optimizer_a, optimizer_b, loader] =
      accelerator.prepare(a, b, sgd_a, adam_b, batches);
  const auto both = [](Net& x, Net& y, const Pair& batch) {
    return torch::nn::functional::cross_entropy(x->forward(batch.first) + y->forward(batch.first),
                                                batch.second);
  };
  for (const bool window : {true, false}) {
    int turn = 0;
    const auto body = [&](const Pair& batch) {
      accelerator.backward(both(model_a, model_b, batch));
      EXPECT_TRUE(optimizer_a.step());
      optimizer_a.zero_grad();
      if (++turn % 2 == 0) {
        EXPECT_TRUE(optimizer_b.step());
        optimizer_b.zero_grad();
      }
    };
    for (const auto& batch : loader) {
      if (window) {
        auto guard = accelerator.accumulate(model_a, model_b);
        body(batch);
      } else {
        body(batch);
      }
    }
  }
  Net plain_a = net_of_seed(1), plain_b = net_of_seed(1);
  torch::optim::SGD other_a(plain_a->parameters(), 0.3);
  torch::optim::Adam other_b(plain_b->parameters(), 0.01);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int64_t turn = 0; turn < 4; ++turn) {
      both(plain_a, plain_b, joined(global_batch_of(batches, world, turn))).backward();
      other_a.step();
      other_a.zero_grad();
      if (turn % 2 == 1) {
        other_b.step();
        other_b.zero_grad();
      }
    }
  }
  EXPECT_LE(largest_difference(*a, *plain_a), 1e-10);
  EXPECT_LE(largest_difference(*b, *plain_b), 1e-8); // Adam: g / |g|
  accelerator.end_training();
}

TEST(Phase, ASecondAcceleratorLeavesTheFirstsStepsAlone) {
  auto first = accelerator_of({.gradient_accumulation_steps = 3});
  auto second = accelerator_of({.gradient_accumulation_steps = 1});
  EXPECT_EQ(first.options().gradient_accumulation_steps, 3);
  auto batches = make_batches(3 * first.num_processes());
  Net net = net_of_rank(first);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = first.prepare(net, sgd, batches);
  int steps = 0;
  for (const auto& batch : loader) {
    auto window = first.accumulate(model);
    first.backward(mean_loss(model, batch));
    steps += optimizer.step();
    EXPECT_EQ(first.sync_gradients(), steps == 1);
    EXPECT_TRUE(second.sync_gradients());
  }
  EXPECT_EQ(steps, 1);
}

TEST(Phase, EvaluationBeforeTrainingLeavesGradientsShared) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world);
  Net net = net_of_rank(accelerator);
  net->eval();
  auto held_out = even_batches(2, 3);
  auto [evaluated, evaluation] = accelerator.prepare(net, held_out);
  for (const auto& batch : evaluation) {
    torch::NoGradGuard no_grad;
    accelerator.gather_for_metrics(evaluated->forward(batch.first));
  }
  net->train();
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_LE(largest_difference(*net, *plain_steps(steps_of(batches, world, 1, 0, 2), 0.3)), 1e-10);
}

// 2 of 4 micro-batches. The ranks' batches have very different numbers of tokens.
TEST(Weights, AShortLastWindowOfUnevenTokensIsTheJoinedBatch) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 4});
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  const auto tokens = [](const Tensor& y) { return (y * 5 + 1).to(torch::kDouble); };
  const auto token_loss = [&](Net& m, const Pair& batch) {
    const Tensor each = torch::nn::functional::cross_entropy(
        m->forward(batch.first), batch.second,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
    return (each * tokens(batch.second)).sum();
  };
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(token_loss(model, batch), tokens(batch.second).sum().item<double>());
  }
  const Pair all = joined(batches);
  const double total = tokens(all.second).sum().item<double>();
  expect_gradients(*net,
                   plain_gradients([&](Net& plain) { return token_loss(plain, all) / total; }));
  EXPECT_EQ(accelerator.last_window().weight, total);
  Net plain = net_of_seed(1);
  EXPECT_NEAR(accelerator.last_window().loss, token_loss(plain, all).item<double>() / total, 1e-12);
}

TEST(Weights, TheEvaluationLossOfRaggedDataIsThatOfOneProcess) {
  auto accelerator = accelerator_of();
  auto batches = make_batches(5); // 1 … 4 rows; ranks without rows at the end
  Net net = net_of_seed(1);
  auto [model, loader] = accelerator.prepare(net, batches);
  Tensor sum = on_device::zeros({2}, torch::kDouble);
  torch::NoGradGuard no_grad;
  for (const auto& batch : loader) {
    sum[0] += sum_loss(model, batch);
    sum[1] += batch.second.numel();
  }
  sum = accelerator.reduce(sum);
  const Tensor wanted = mean_loss(net, joined(batches));
  EXPECT_NEAR((sum[0] / sum[1]).item<double>(), wanted.item<double>(), 1e-12);
}

TEST(Weights, MeanOfMeansCountsEveryBatchTheSame) {
  auto accelerator = accelerator_of(
      {.gradient_accumulation_steps = 2, .loss_weighting = LossWeighting::mean_of_means});
  const int world = accelerator.num_processes();
  auto batches = make_batches(3 * world);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  int64_t turn = 0;
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    const auto rows = static_cast<double>(batch.second.numel());
    if (turn == 1) {
      accelerator.backward(sum_loss(model, batch), rows);
    } else {
      accelerator.backward(mean_loss(model, batch));
    }
    if (accelerator.sync_gradients()) { // two batches, then one of two
      expect_gradients(*net, plain_gradients([&](Net& plain) {
        Tensor sum = on_device::zeros({}, torch::kDouble);
        for (int64_t t = turn / 2 * 2; t <= turn; ++t) {
          for (const Pair& other : global_batch_of(batches, world, t)) {
            sum = sum + mean_loss(plain, other);
          }
        }
        return sum / (2.0 * world);
      }));
      optimizer.zero_grad();
    }
    ++turn;
  }
  accelerator.backward(mean_loss(model, batches[0]));
  expect_gradients(*net, plain_gradients([&](Net& plain) { return mean_loss(plain, batches[0]); }));
}

TEST(Schedule, TicksOncePerOptimizerStepWhateverTheWorld) {
  for (const auto unit : {SchedulerTicks::per_optimizer_step, SchedulerTicks::per_process}) {
    auto accelerator = accelerator_of({.gradient_accumulation_steps = 2, .scheduler_ticks = unit});
    const int world = accelerator.num_processes();
    auto batches = make_batches(5 * world);
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.3);
    Decay decay(sgd);
    auto [model, optimizer, loader, scheduler] = accelerator.prepare(net, sgd, batches, decay);
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
    const bool each = unit == SchedulerTicks::per_process;
    EXPECT_EQ(decay.ticks, each ? 3 * world : 3);
  }
}

TEST(Schedule, ASkippedStepDoesNotAdvanceIt) {
  for (const bool window : {true, false}) {
    auto accelerator = accelerator_of({.skip_non_finite_steps = true});
    const int world = accelerator.num_processes();
    auto batches = make_batches(4 * world);
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.3);
    Decay decay(sgd);
    auto [model, optimizer, loader, scheduler] = accelerator.prepare(net, sgd, batches, decay);
    int turn = 0;
    const auto body = [&](const Pair& batch) {
      const bool bad = turn++ == 1;
      const bool mine = bad && accelerator.process_index() == world - 1;
      accelerator.backward(mean_loss(model, batch) * (mine ? NAN : 1.0));
      const StepResult result = optimizer.step();
      EXPECT_EQ(result.was_skipped(), bad);
      EXPECT_EQ(scheduler.step(), !bad);
      optimizer.zero_grad();
    };
    for (const auto& batch : loader) {
      if (window) {
        auto guard = accelerator.accumulate(model);
        body(batch);
      } else {
        body(batch);
      }
    }
    EXPECT_EQ(decay.ticks, 3);
    EXPECT_TRUE(net->first->weight.isfinite().all().item<bool>());
  }
}

} // namespace hasten::accelerator_test
