// backward() without accumulate(), and no_sync(): worlds 1 to 4, fp64.
#include "accelerator/plain_steps.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

struct ByHand {
  Net net{nullptr};
  int ticks = 0;
};

// Six batches on each rank, k of them in a step. The loop divides the loss by the step's number of
// batches. With `window` accumulate() does it.
ByHand train_by_hand(int64_t k, bool window, bool quiet) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = k});
  auto batches = even_batches(6 * accelerator.num_processes());
  ByHand run;
  run.net = net_of_rank(accelerator);
  torch::optim::SGD sgd(run.net->parameters(), torch::optim::SGDOptions(0.3).momentum(0.9));
  Decay decay(sgd);
  auto [model, optimizer, loader, scheduler] = accelerator.prepare(run.net, sgd, batches, decay);
  int64_t i = 0;
  for (const auto& batch : loader) {
    if (window) {
      auto guard = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      continue;
    }
    const int64_t length = std::min(k, 6 - i / k * k);
    const bool last = ++i % k == 0 || i == 6;
    const Tensor loss = mean_loss(model, batch) / static_cast<double>(length);
    if (quiet && !last) {
      auto guard = accelerator.no_sync(model);
      EXPECT_FALSE(accelerator.sync_gradients());
      accelerator.backward(loss);
    } else {
      accelerator.backward(loss);
    }
    EXPECT_EQ(accelerator.sync_gradients(), last || !quiet);
    if (last) {
      EXPECT_TRUE(optimizer.step());
      EXPECT_TRUE(scheduler.step());
      optimizer.zero_grad();
    }
  }
  accelerator.end_training();
  run.ticks = decay.ticks;
  return run;
}

TEST(Outside, DividingByKByHandIsAccumulate) {
  for (const int64_t k : {1, 3, 4}) {
    SCOPED_TRACE(k);
    const ByHand window = train_by_hand(k, true, false);
    for (const bool quiet : {false, true}) {
      const ByHand by_hand = train_by_hand(k, false, quiet);
      EXPECT_LE(largest_difference(*by_hand.net, *window.net), 1e-12);
      EXPECT_EQ(by_hand.ticks, window.ticks);
    }
  }
}

TEST(Outside, AddsTheMeanOverAllRanksRowsToWhatIsThere) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(3 * world); // 1 … 4 rows
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  int64_t turn = 0;
  for (const auto& batch : loader) {
    accelerator.backward(mean_loss(model, batch));
    const auto wanted = plain_gradients([&](Net& plain) {
      Tensor sum = on_device::zeros({}, torch::kDouble);
      for (int64_t t = 0; t <= turn; ++t) {
        sum = sum + mean_loss(plain, joined(global_batch_of(batches, world, t)));
      }
      return sum;
    });
    expect_gradients(*net, wanted);
    ++turn;
  }
  EXPECT_EQ(turn, 3);
  optimizer.zero_grad();
  EXPECT_FALSE(net->first->weight.grad().defined()) << "as torch's does";
}

TEST(Outside, OneProcessIsBitwiseTorch) {
  if (testing_support::test_world().world_size > 1) {
    return;
  }
  auto accelerator = accelerator_of();
  auto batches = make_batches(6);
  Net net = net_of_seed(1), plain = net_of_seed(1);
  torch::optim::SGD sgd(net->parameters(), 0.3), other(plain->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  int64_t i = 0;
  for (const auto& batch : loader) {
    accelerator.backward(mean_loss(model, batch) / 3);
    (mean_loss(plain, batch) / 3).backward();
    for (size_t p = 0; p < net->parameters().size(); ++p) {
      EXPECT_TRUE(torch::equal(net->parameters()[p].grad(), plain->parameters()[p].grad()));
    }
    if (++i % 3 == 0) {
      optimizer.step();
      optimizer.zero_grad();
      other.step();
      other.zero_grad();
    }
  }
  EXPECT_EQ(largest_difference(*net, *plain), 0);
}

TEST(Outside, ASumIsDividedByTheWeightsOfAllRanks) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(world);
  Net net = net_of_rank(accelerator);
  accelerator.prepare(net);
  const auto mine = static_cast<size_t>(accelerator.process_index());
  const auto weight = [](size_t rank) { return 2.0 + 3.0 * double(rank); };
  accelerator.backward(sum_loss(net, batches[mine]), weight(mine));
  expect_gradients(*net, plain_gradients([&](Net& plain) {
    Tensor sum = on_device::zeros({}, torch::kDouble);
    double weights = 0;
    for (size_t rank = 0; rank < batches.size(); ++rank) {
      sum = sum + sum_loss(plain, batches[rank]);
      weights += weight(rank);
    }
    return sum / weights;
  }));
}

// In one case only one rank has a batch in the last global batch. In the other a rank has no batch
// at all.
TEST(Outside, RanksThatRanOutTakePartInStepsByHand) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  for (const int64_t count : {2 * world + 1, std::max(1, world - 1)}) {
    auto batches = make_batches(count);
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.3).momentum(0.9));
    Decay decay(sgd);
    auto [model, optimizer, loader, scheduler] = accelerator.prepare(net, sgd, batches, decay);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const auto& batch : loader) {
        accelerator.backward(mean_loss(model, batch));
        accelerator.clip_grad_norm_(model, 0.2);
        optimizer.step();
        scheduler.step();
        optimizer.zero_grad();
      }
    }
    const auto options = torch::optim::SGDOptions(0.3).momentum(0.9);
    const PlainRun plain = plain_run<torch::optim::SGD>(batches, options, world, 1, 2);
    EXPECT_LE(largest_difference(*net, *plain.net), 1e-10);
    EXPECT_EQ(decay.ticks, static_cast<int>(plain.losses.size()));
  }
  accelerator.end_training();
}

TEST(Outside, OnlyModelsThatTheLossDependsOnTakePart) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = even_batches(2 * world, 3);
  Net a = net_of_rank(accelerator);
  torch::manual_seed(7); // b has larger layers, so it is reduced first
  torch::nn::Linear b(torch::nn::LinearOptions(3, 40));
  b->to(testing_support::run_device(), torch::kDouble);
  accelerator.prepare(a, b);
  const auto mine = static_cast<size_t>(accelerator.process_index());
  const auto chain = [](Net& first, torch::nn::Linear& second, const Pair& batch) {
    return second->forward(first->forward(batch.first)).square().mean();
  };
  accelerator.backward(mean_loss(a, batches[mine]));
  EXPECT_FALSE(b->weight.grad().defined());
  accelerator.backward(chain(a, b, batches[mine]));
  const auto global_batch = joined(global_batch_of(batches, world, 0));
  torch::manual_seed(7);
  torch::nn::Linear other(torch::nn::LinearOptions(3, 40));
  other->to(testing_support::run_device(), torch::kDouble);
  expect_gradients(*a, plain_gradients([&](Net& plain) {
    return mean_loss(plain, global_batch) + chain(plain, other, global_batch);
  }));
  expect_gradients(*b, {other->weight.grad(), other->bias.grad()});
}

// The result of torch's DDP: the mean over ranks of each rank's sum.
TEST(NoSync, TheNextBackwardReducesWhatHasGathered) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  const int rank = accelerator.process_index();
  auto batches = even_batches(3 * world);
  Net net = net_of_rank(accelerator);
  accelerator.prepare(net);
  const auto own = [&](int64_t turn) { return batches[static_cast<size_t>(turn * world + rank)]; };
  const auto sum_of_global_batches = [&](int64_t count) {
    return plain_gradients([&](Net& plain) {
      Tensor sum = on_device::zeros({}, torch::kDouble);
      for (int64_t t = 0; t < count; ++t) {
        sum = sum + mean_loss(plain, joined(global_batch_of(batches, world, t)));
      }
      return sum;
    });
  };
  accelerator.backward(mean_loss(net, own(0)));
  {
    auto quiet = accelerator.no_sync(net);
    {
      auto nested = accelerator.no_sync();
      accelerator.backward(mean_loss(net, own(1)));
    }
    EXPECT_FALSE(accelerator.sync_gradients());
    // Both forwards are inside no_sync(). Only where backward is matters.
    const Tensor loss = mean_loss(net, own(2));
    auto sync = accelerator.trigger_sync(net);
    accelerator.backward(loss);
    EXPECT_TRUE(accelerator.sync_gradients());
  }
  expect_gradients(*net, sum_of_global_batches(3));
  EXPECT_EQ(accelerator.last_window().number, 2u);
}

TEST(NoSync, SumsAreTheTotalOverTheTotalWeight) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world);
  Net net = net_of_rank(accelerator);
  accelerator.prepare(net);
  const auto own = [&](int64_t turn) {
    return batches[static_cast<size_t>(turn * world + accelerator.process_index())];
  };
  {
    auto quiet = accelerator.no_sync(net);
    accelerator.backward(sum_loss(net, own(0)), static_cast<double>(own(0).second.numel()));
  }
  expect_says(message_of([&] { accelerator.backward(mean_loss(net, own(1))); }),
              "a mean after 1 sum losses");
  accelerator.backward(sum_loss(net, own(1)), static_cast<double>(own(1).second.numel()));
  expect_gradients(*net,
                   plain_gradients([&](Net& plain) { return mean_loss(plain, joined(batches)); }));
}

TEST(NoSync, InsideAWindowItsLastBackwardReduces) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    auto quiet = accelerator.no_sync(model);
    accelerator.backward(mean_loss(model, batch));
    EXPECT_FALSE(accelerator.sync_gradients());
    EXPECT_FALSE(optimizer.step());
    const Tensor second = model->forward(batch.first).square().mean();
    auto sync = accelerator.trigger_sync(model);
    accelerator.backward(second);
  }
  EXPECT_EQ(accelerator.last_window().number, 1u);
  expect_gradients(*net, plain_gradients([&](Net& plain) {
    const Pair all = joined(batches);
    return mean_loss(plain, all) + plain->forward(all.first).square().mean();
  }));
}

} // namespace hasten::accelerator_test
