// Ranks with different numbers of batches. The result is right, or every rank throws an error that
// says what to do. Worlds 1 to 4, fp64.
#include "accelerator/plain_steps.h"
#include "accelerator/state_rig.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

// The data is one batch for rank 0, or one row. The loop uses torch's clipping and optimizer.
TEST(UnevenData, ARankThatNeverHadARowGetsAStandIn) {
  enum class Distribution { in_turn, dispatched, split };
  for (const Distribution distribution :
       {Distribution::in_turn, Distribution::dispatched, Distribution::split}) {
    SCOPED_TRACE(static_cast<int>(distribution));
    auto accelerator = accelerator_of(
        {.dataloader_config = {.split_batches = distribution == Distribution::split,
                               .dispatch_batches = distribution == Distribution::dispatched}});
    std::vector<Pair> batches = make_batches(1);
    EXPECT_EQ(batches[0].second.numel(), 1);
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.3);
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
    int64_t turns = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const auto& batch : loader) {
        net->zero_grad();
        auto window = accelerator.accumulate(model);
        EXPECT_GT(batch.second.numel(), 0);
        accelerator.backward(mean_loss(model, batch));
        torch::nn::utils::clip_grad_norm_(net->parameters(), 0.2);
        sgd.step();
        EXPECT_EQ(accelerator.last_window().rows, 1);
        ++turns;
      }
    }
    accelerator.end_training();
    EXPECT_EQ(turns, 2);
    const PlainRun plain =
        plain_run<torch::optim::SGD>(batches, torch::optim::SGDOptions(0.3), 1, 1, 0);
    torch::optim::SGD other(plain.net->parameters(), 0.3);
    Net wanted = plain.net;
    for (int epoch = 0; epoch < 2; ++epoch) {
      wanted->zero_grad();
      mean_loss(wanted, batches[0]).backward();
      torch::nn::utils::clip_grad_norm_(wanted->parameters(), 0.2);
      other.step();
    }
    EXPECT_LE(largest_difference(*net, *wanted), 1e-12);
  }
}

// The range distributes its batches itself.
TEST(UnevenData, ARankThatNeverHadARowOfADataLoaderGetsAStandIn) {
  for (const int64_t prefetch : {0, 2}) {
    auto accelerator = accelerator_of({.dataloader_config = {.prefetch = prefetch}});
    DataLoader rows(std::make_shared<state_test::RowsOfLengths>(1), {.batch_size = 2});
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, rows);
    int64_t turns = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const Batch& batch : loader) {
        EXPECT_GT(batch.tensors.begin()->second.size(0), 0);
        auto window = accelerator.accumulate(model);
        accelerator.backward(net->forward(on_device::ones({1, 5}, torch::kDouble)).sum());
        optimizer.step();
        optimizer.zero_grad();
        EXPECT_EQ(accelerator.last_window().weight, 1);
        ++turns;
      }
    }
    EXPECT_EQ(turns, 2);
    expect_equal_on_ranks(accelerator, net->parameters());
    accelerator.end_training();
  }
}

// Rank 0 gets all batches. The others get none, not even a batch without rows.
struct RankZerosRange {
  void shard(int rank, int) { batches.resize(rank == 0 ? 2 : 0); }
  auto begin() const { return batches.begin(); }
  auto end() const { return batches.end(); }
  std::vector<Pair> batches = even_batches(2);
};

TEST(UnevenData, ARangeThatGivesARankNoBatchIsAnErrorOnAll) {
  auto accelerator = accelerator_of();
  if (accelerator.num_processes() == 1) {
    return;
  }
  RankZerosRange batches;
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  const std::string said = message_of<Error>([&, &model = model, &loader = loader] {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
    }
  });
  expect_says(said, "this rank has no sample to train on: rank=");
}

TEST(UnevenData, ABreakOnOneRankIsAnErrorOnAll) {
  const int world = testing_support::test_world().world_size;
  if (world == 1) {
    return;
  }
  const std::string said = said_after_break(even_batches(3 * world), false);
  expect_says(said,
              "others continue to train: ended=" + std::to_string(world - 1) + ", world_size=");
  expect_says(said, "leave the loop on all ranks");
}

TEST(UnevenData, ABreakOnAllRanksAlikeIsRight) {
  const int world = testing_support::test_world().world_size;
  EXPECT_EQ(said_after_break(even_batches(3 * world), true), "nothing was thrown");
}

// Rank r has r + 1 batches of its own.
template <typename Turn>
void own_loop(const Accelerator& accelerator, const Turn& turn) {
  const int rank = accelerator.process_index();
  for (int64_t b = 0; b <= rank; ++b) {
    turn(even_batches(16)[static_cast<size_t>(3 * rank + b)]);
  }
}

TEST(UnevenData, AnUnevenLoopOverDataOfOnesOwnIsAnErrorOnAll) {
  for (const auto& [windows, joins] : {std::pair(true, false), {false, false}, {true, true}}) {
    auto accelerator = accelerator_of();
    if (accelerator.num_processes() == 1) {
      return;
    }
    Net net = net_of_rank(accelerator);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    const std::string said =
        message_of<CommunicationError>([&, &model = model, &optimizer = optimizer] {
          own_loop(accelerator, [&](const Pair& batch) {
            if (windows) {
              auto window = accelerator.accumulate(model);
              accelerator.backward(mean_loss(model, batch) * 4, 4);
            } else {
              accelerator.backward(mean_loss(model, batch));
            }
            optimizer.step();
            optimizer.zero_grad();
          });
          joins ? accelerator.join_uneven_inputs() : accelerator.end_training();
        });
    expect_says(said, "others continue to train: ended=0, world_size=");
    expect_says(said, "prepare() the loader");
  }
}

TEST(UnevenData, JoinUnevenInputsHasNothingToDoAfterAPreparedLoader) {
  auto accelerator = accelerator_of();
  auto batches = make_batches(2 * accelerator.num_processes() + 1);
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    const uint64_t windows = accelerator.last_window().number;
    accelerator.join_uneven_inputs();
    EXPECT_EQ(accelerator.last_window().number, windows);
  }
  expect_equal_on_ranks(accelerator, net->parameters());
  accelerator.end_training();
}

} // namespace hasten::accelerator_test
