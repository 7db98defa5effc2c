// A rank without rows gets an earlier batch again, with weight 0. So the loop's body runs equally
// often on every rank. Worlds 1 to 4, fp64.
#include "accelerator/plain_steps.h"
#include "accelerator/state_rig.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

enum class StandInLoss { mean, sum, window };

// The body uses torch's own clipping and optimizer, and a counter. They are right only if the body
// runs on every rank.
template <typename Backward>
void train_with_own_code(Net& net, torch::optim::SGD& sgd, int64_t& turns,
                         const Backward& backward) {
  net->zero_grad();
  backward();
  torch::nn::utils::clip_grad_norm_(net->parameters(), 0.2);
  if (++turns % 2 == 0) {
    sgd.step();
  }
}

TEST(StandIns, TheLoopsBodyRunsEquallyOftenOnEveryRankWhateverItDoes) {
  for (const auto kind : {StandInLoss::mean, StandInLoss::sum, StandInLoss::window}) {
    SCOPED_TRACE(static_cast<int>(kind));
    auto accelerator = accelerator_of();
    const int world = accelerator.num_processes();
    auto batches = make_batches(2 * world + 1); // in the last turn only rank 0 has a batch
    int64_t rows = 0;
    for (const Pair& batch : batches) {
      rows += batch.second.numel();
    }
    const auto options = torch::optim::SGDOptions(0.3).momentum(0.9);

    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), options);
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
    int64_t turns = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      int64_t gathered = 0;
      for (const auto& batch : loader) {
        train_with_own_code(net, sgd, turns, [&, &model = model] {
          const auto count = static_cast<double>(batch.second.numel());
          const Tensor loss = mean_loss(model, batch);
          if (kind == StandInLoss::mean) {
            accelerator.backward(loss);
          } else if (kind == StandInLoss::sum) {
            accelerator.backward(loss * count, count);
          } else {
            auto window = accelerator.accumulate(model);
            accelerator.backward(loss * count, count);
          }
        });
        gathered += accelerator.gather_for_metrics(batch.second).size(0);
      }
      EXPECT_EQ(gathered, rows);
    }
    EXPECT_EQ(turns, 6);
    accelerator.end_training();

    Net plain = net_of_seed(1);
    torch::optim::SGD plain_sgd(plain->parameters(), options);
    int64_t plain_turns = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int64_t turn = 0; turn < 3; ++turn) {
        std::vector<Tensor> x, y;
        for (const Pair& batch : joined_window(batches, world, 1, turn)) {
          x.push_back(batch.first);
          y.push_back(batch.second);
        }
        train_with_own_code(plain, plain_sgd, plain_turns,
                            [&] { mean_loss(plain, {torch::cat(x), torch::cat(y)}).backward(); });
      }
    }
    EXPECT_LE(largest_difference(*net, *plain), 1e-12);
  }
}

TEST(StandIns, AreNotInTheSamplesOfAReport) {
  for (const bool windows : {true, false}) {
    auto accelerator = accelerator_of();
    const int world = accelerator.num_processes();
    auto batches = make_batches(2 * world + 1);
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
    int64_t turn = 0;
    const auto step = [&, &model = model, &optimizer = optimizer](const Pair& batch) {
      accelerator.backward(mean_loss(model, batch));
      EXPECT_EQ(accelerator.last_window().rows,
                joined(global_batch_of(batches, world, turn++)).second.numel());
      optimizer.step();
      optimizer.zero_grad();
    };
    for (const auto& batch : loader) {
      if (windows) {
        auto window = accelerator.accumulate(model);
        step(batch);
      } else {
        step(batch);
      }
    }
    accelerator.end_training();
  }
}

TEST(StandIns, LeaveTorchsGeneratorAsItWas) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world + 1);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  torch::manual_seed(5);
  int64_t turns = 0;
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    on_device::rand({100}); // as dropout does
    ++turns;
  }
  EXPECT_EQ(turns, 3);
  const Tensor next = on_device::rand({3});
  torch::manual_seed(5);
  for (int drawn = 0; drawn < (accelerator.is_main_process() ? 3 : 2); ++drawn) {
    on_device::rand({100});
  }
  EXPECT_TRUE(torch::equal(next, on_device::rand({3})));
  accelerator.end_training();
}

// The pass begins late, so this rank had no batch before it, also in a range that seeks.
TEST(StandIns, BehindASkippedBeginningToo) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world + 1);
  DataLoader rows(std::make_shared<state_test::RowsOfLengths>(2 * (2 * world + 1)),
                  {.batch_size = 2, .shuffle = true, .group_by_length = false});
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.1), other(net->parameters(), 0.1);
  auto [model, optimizer, pairs] = accelerator.prepare(net, sgd, batches);
  auto [same, optimizer_too, sought] = accelerator.prepare(net, other, rows);
  const auto turns = [&](auto& loader, const auto& has_rows) {
    int64_t count = 0;
    for (const auto& batch : accelerator.skip_first_batches(loader, 2)) {
      EXPECT_TRUE(has_rows(batch));
      auto window = accelerator.accumulate(loader, net);
      accelerator.backward(net->forward(on_device::ones({1, 5}, torch::kDouble)).sum());
      EXPECT_GT(accelerator.last_window().weight, 0);
      ++count;
    }
    return count;
  };
  const auto in_pair = [](const Pair& batch) { return batch.first.size(0) > 0; };
  const auto in_batch = [](const Batch& batch) {
    return batch.tensors.begin()->second.size(0) > 0;
  };
  EXPECT_EQ(turns(pairs, in_pair), 1);
  EXPECT_EQ(turns(sought, in_batch), 1);
  accelerator.end_training();
}

// check_trigger is collective and returns the same on all ranks.
TEST(StandIns, ATriggerOfTheLastTurnStopsEveryRank) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world + 1);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  int64_t turns = 0;
  bool stop = false;
  for (int epoch = 0; epoch < 3 && !stop; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      if (++turns == 6 && accelerator.process_index() == world - 1) {
        accelerator.set_trigger(); // in a stand-in batch if there are several ranks
      }
      stop = stop || accelerator.check_trigger();
    }
  }
  EXPECT_EQ(turns, 6);
  EXPECT_TRUE(stop);
  accelerator.end_training();
}

// The last backward of a window reduces, also on ranks with a stand-in batch.
TEST(StandIns, TriggerSyncInTheLastTurnReducesOnEveryRank) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world + 1);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.0);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  const auto both = [](Net& of, const Pair& batch) {
    return std::pair{mean_loss(of, batch), of->forward(batch.first).square().mean()};
  };
  uint64_t windows = 0;
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    auto quiet = accelerator.no_sync(model);
    const auto [first, second] = both(model, batch);
    accelerator.backward(first);
    EXPECT_FALSE(accelerator.sync_gradients());
    auto sync = accelerator.trigger_sync(model);
    accelerator.backward(second);
    if (optimizer.step()) {
      ++windows;
      const auto wanted = plain_gradients([&](Net& plain) {
        const auto [a, b] = both(
            plain, joined(joined_window(batches, world, 2, static_cast<int64_t>(windows) - 1)));
        return a + b;
      });
      expect_gradients(*net, wanted);
      optimizer.zero_grad();
    }
  }
  EXPECT_EQ(windows, 2u);
  accelerator.end_training();
}

// Two optimizers for one model. The second one's gradients accumulate. In the last turn only rank 0
// has a batch: the others have stand-in batches.
TEST(StandIns, TwoOptimizersOfOneModelOneZeroedAreThoseOfOneProcess) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world + 1);
  Net net = net_of_rank(accelerator);
  const auto momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD sgd_a(net->first->parameters(), momentum);
  torch::optim::SGD sgd_b(net->second->parameters(), momentum);
  auto [model, a, b, loader] = accelerator.prepare(net, sgd_a, sgd_b, batches);
  const auto turn = [&](Net& of, const Pair& batch) {
    auto window = accelerator.accumulate(of);
    const auto rows = static_cast<double>(batch.second.numel());
    accelerator.backward(mean_loss(of, batch) * rows, rows);
    a.step();
    b.step();
    a.zero_grad();
  };
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : loader) {
      turn(model, batch);
    }
  }
  Net plain = net_of_seed(1);
  torch::optim::SGD plain_a(plain->first->parameters(), momentum);
  torch::optim::SGD plain_b(plain->second->parameters(), momentum);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int64_t t = 0; t < 3; ++t) {
      mean_loss(plain, joined(global_batch_of(batches, world, t))).backward();
      plain_a.step();
      plain_b.step();
      plain_a.zero_grad();
    }
  }
  EXPECT_LE(largest_difference(*net, *plain), 1e-12);
  accelerator.end_training();
}

} // namespace hasten::accelerator_test
