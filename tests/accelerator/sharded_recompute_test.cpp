// Sharded blocks whose activations are recomputed.
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/activation_checkpoint/planner.h"
#include "parallel/fully_shard_rig.h"
#include "support/on_device.h"

namespace hasten::shard_test {

// Recomputation with dropout: the same bits, and no additional gather.
TEST(ShardedRecompute, CheckpointedBlocksGiveTheSameBits) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const bool alone = communicator->world_size() == 1;
  const auto train = [&](bool checkpoint, int prefetch) {
    Net net(static_cast<uint64_t>(rank) + 1, 3);
    for (Awkward& block : net->blocks) {
      block->drops = true;
    }
    FullyShard sharded(communicator, net.ptr(), blocks_of(net), {.prefetch = prefetch});
    if (checkpoint) {
      gradient_checkpointing_enable(net);
    }
    torch::manual_seed(static_cast<uint64_t>(rank) + 7);
    for (int turn = 0; turn < 3; ++turn) {
      sharded.reset_report();
      shard_step(sharded, net, rank, turn, 2);
      descend(net);
      EXPECT_EQ(gathers_of(sharded), alone ? Counts(4, 0) : Counts({4, 4, 2, 2}));
    }
    EXPECT_EQ(net->blocks[1]->calls, checkpoint ? 12 : 6);
    std::vector<Tensor> shards;
    for (const ShardedParameter& entry : sharded.parameters()) {
      shards.push_back(entry.parameter.detach().clone());
    }
    return shards;
  };
  const auto plain = train(false, 1);
  for (const int prefetch : {0, 1}) {
    const auto again = train(true, prefetch);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(torch::equal(plain[i], again[i])) << i;
    }
  }
}

// One region over four blocks. All blocks except the last are gathered once more.
TEST(ShardedRecompute, ARegionOverSeveralUnitsGathersThemOnceMore) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Net net(static_cast<uint64_t>(rank) + 1, 4);
  Net plain(1, 4);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net), {.prefetch = 0});
  auto plan = std::make_shared<ActivationPlan>();
  plan->blocks = {"blocks.0", "blocks.1", "blocks.2", "blocks.3"};
  plan->regions = {{0, 4}};
  gradient_checkpointing_enable(net, {.plan = plan});
  for (int turn = 0; turn < 2; ++turn) {
    sharded.reset_report();
    shard_step(sharded, net, rank, turn);
    if (communicator->world_size() > 1) {
      EXPECT_EQ(gathers_of(sharded), Counts({3, 3, 3, 1, 1}));
    }
    plain_step(plain, communicator->world_size(), turn);
    expect_equal_gradients(sharded, *plain, 1e-12);
    descend(net);
    descend(plain);
  }
}

TEST(ShardedRecompute, IsEnabledAfterAModelIsSharded) {
  auto communicator = fresh_communicator();
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Tanh(), torch::nn::Linear(4, 4));
  on_device::moved(net);
  const auto blocks = repeated_blocks(*net);
  ASSERT_EQ(blocks.size(), 2u) << "those that have parameters";
  gradient_checkpointing_enable(net);
  EXPECT_TRUE(says(what_of([&] { FullyShard sharded(communicator, net.ptr(), blocks); }),
                   "after the model is sharded"));
  gradient_checkpointing_disable(net);
  // In the other order both work, and the net does not change.
  const Tensor x = on_device::randn({3, 4});
  {
    FullyShard sharded(communicator, net.ptr(), blocks);
    gradient_checkpointing_enable(net);
    sharded.begin();
    Tensor loss;
    {
      const auto scope = sharded.forward_scope();
      loss = net->forward(x).square().sum();
    }
    sharded.start_backward(true);
    loss.backward();
    sharded.finish_backward();
    sharded.finish(1);
    EXPECT_EQ(gathers_of(sharded),
              communicator->world_size() > 1 ? Counts({2, 1, 0}) : Counts(3, 0));
    gradient_checkpointing_disable(net);
  }
  EXPECT_EQ(net->ptr(0), blocks[0]);
}

} // namespace hasten::shard_test
