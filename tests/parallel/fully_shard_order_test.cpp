// The order in which units are gathered and reduced, for all kinds of forward and backward.
#include <chrono>
#include <thread>

#include "hasten/core/memory.h"
#include "parallel/fully_shard_rig.h"
#include "support/on_device.h"

namespace hasten::shard_test {

// The collectives of a step of `micro` batches, for the blocks and for the root.
TEST(FullyShardOrder, GathersAndReductionsAreTheTables) {
  struct Row {
    FullyShardOptions options;
    int micro;
    int64_t gathers;
    int64_t last_gathers; // of the last block and of the root
    int64_t reductions;
  };
  const std::vector<Row> rows{{{}, 1, 2, 1, 1},
                              {{}, 3, 6, 3, 3},
                              {{.prefetch = 0}, 3, 6, 3, 3},
                              {{.sync_each_batch = false}, 3, 6, 3, 1},
                              {{.reshard_after_forward = false}, 3, 1, 1, 3},
                              {{.strategy = ShardingStrategy::zero2}, 1, 1, 1, 1},
                              {{.strategy = ShardingStrategy::zero1}, 3, 1, 1, 1}};
  for (size_t i = 0; i < rows.size(); ++i) {
    auto communicator =
        fresh_communicator({.timeout = std::chrono::seconds(20), .name = std::to_string(i)});
    const bool alone = communicator->world_size() == 1;
    Net net(1, 3);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net), rows[i].options);
    for (int turn = 0; turn < 2; ++turn) { // from the second on units are gathered ahead
      sharded.reset_report();
      shard_step(sharded, net, communicator->rank(), turn, rows[i].micro);
      const ShardReport report = sharded.report();
      ASSERT_EQ(report.units.size(), 4u);
      for (size_t unit = 0; unit < 4; ++unit) {
        const int64_t wanted = unit < 2 ? rows[i].gathers : rows[i].last_gathers;
        EXPECT_EQ(report.units[unit].gathers, alone ? 0 : wanted) << i << " " << unit;
        EXPECT_EQ(report.units[unit].reductions, alone ? 0 : rows[i].reductions)
            << i << " " << unit;
      }
      EXPECT_EQ(report.units[1].name, "blocks.1");
      if (!alone) {
        EXPECT_GT(report.total.gathered_bytes, 0);
        EXPECT_GT(report.total.reduced_bytes, 0);
      }
    }
  }
}

TEST(FullyShardOrder, AUnitMayBeCalledTwiceAndInAnyOrder) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const int world = communicator->world_size();
  Net net(static_cast<uint64_t>(rank) + 1, 3);
  Net plain(1, 3);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  const std::vector<std::vector<int>> orders{{0, 1, 0, 2}, {1, 1, 2}, {2, 0, 1}, {0, 1, 2}};
  for (size_t turn = 0; turn < orders.size(); ++turn) {
    const Loss loss = [&](NetImpl& of, const Tensor& rows) {
      return of.forward(rows, orders[turn]).square().sum();
    };
    shard_step(sharded, net, rank, static_cast<int>(turn), 1, loss);
    plain_step(plain, world, static_cast<int>(turn), 1, loss);
    expect_equal_gradients(sharded, *plain, 1e-12);
    descend(net);
    descend(plain);
  }
  EXPECT_EQ(sharded.report().unsharded_parameter_bytes, 0);
}

// The second batch does not use the last block. The third does not use the first block.
TEST(FullyShardOrder, BatchesOfAWindowMayUseOtherUnits) {
  for (const bool each : {true, false}) {
    auto communicator =
        fresh_communicator({.timeout = std::chrono::seconds(20), .name = each ? "each" : "last"});
    const int rank = communicator->rank();
    Net net(static_cast<uint64_t>(rank) + 1, 3);
    Net plain(1, 3);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net), {.sync_each_batch = each});
    int calls = 0;
    const Loss loss = [&](NetImpl& of, const Tensor& rows) {
      const std::vector<std::vector<int>> orders{{0, 1, 2}, {0, 1}, {1, 2}};
      return of.forward(rows, orders[static_cast<size_t>(calls++ % 3)]).square().sum();
    };
    shard_step(sharded, net, rank, 0, 3, loss);
    calls = 0;
    plain_step(plain, communicator->world_size(), 0, 3, loss);
    expect_equal_gradients(sharded, *plain, 1e-12);
  }
}

// A block that contains other blocks and uses its own parameters before and after them.
struct AroundImpl : torch::nn::Module {
  explicit AroundImpl(uint64_t seed) {
    torch::manual_seed(seed);
    own = register_module("own", torch::nn::Linear(kWide, kWide));
    first = register_module("first", Awkward());
    second = register_module("second", Awkward());
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = call_block(first, torch::tanh(own->forward(x)));
    return own->forward(call_block(second, y) + y);
  }
  torch::nn::Linear own{nullptr};
  Awkward first{nullptr}, second{nullptr};
};
TORCH_MODULE(Around);

TEST(FullyShardOrder, BlocksMayBeInsideBlocks) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const bool alone = communicator->world_size() == 1;
  const auto make = [](uint64_t seed) {
    return torch::nn::Sequential(Around(seed), Around(seed + 100));
  };
  auto net = make(static_cast<uint64_t>(rank) + 1);
  auto plain = make(1);
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  for (const auto& outer : net->children()) {
    blocks.push_back(outer);
    blocks.push_back(outer->named_children()["first"]);
    blocks.push_back(outer->named_children()["second"]);
  }
  FullyShard sharded(communicator, net.ptr(), blocks);
  for (int turn = 0; turn < 2; ++turn) {
    sharded.reset_report();
    sharded.begin();
    Tensor loss;
    {
      const auto scope = sharded.forward_scope();
      loss = net->forward(rows_of(rank, turn, kWide)).square().sum();
    }
    EXPECT_EQ(sharded.report().unsharded_parameter_bytes == 0, alone) << "the last outer one";
    sharded.start_backward(true);
    loss.backward();
    sharded.finish_backward();
    sharded.finish(1);
    EXPECT_EQ(gathers_of(sharded), alone ? Counts(7, 0) : Counts({2, 2, 2, 1, 2, 2, 0}));
    plain->zero_grad();
    for (int r = 0; r < communicator->world_size(); ++r) {
      plain->forward(rows_of(r, turn, kWide)).square().sum().backward();
    }
    expect_equal_gradients(sharded, *plain, 1e-12);
    net->zero_grad();
  }
}

// Two forwards. Then one backward of both, or a backward for each, in either order.
TEST(FullyShardOrder, SeveralForwardsMayComeBeforeTheirBackward) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const int world = communicator->world_size();
  for (const int kind : {0, 1, 2}) {
    Net net(static_cast<uint64_t>(rank) + 1, 3);
    Net plain(1, 3);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net));
    for (int turn = 0; turn < 2; ++turn) {
      sharded.begin();
      std::vector<Tensor> losses;
      net->in_backward = [&] {
        const auto units = sharded.report().units;
        const auto bytes = [](const ShardUnitReport& unit) {
          return unit.gathered_bytes / std::max<int64_t>(1, unit.gathers);
        };
        EXPECT_LE(sharded.report().unsharded_parameter_bytes, bytes(units[3]) + 2 * bytes(units[0]))
            << "the root and two blocks";
      };
      for (int m = 0; m < 2; ++m) {
        const auto scope = sharded.forward_scope();
        losses.push_back(square_loss(*net, rows_of(rank, 2 * turn + m)));
      }
      if (kind == 0) {
        losses = {losses[0] + losses[1]};
      } else if (kind == 2) {
        std::swap(losses[0], losses[1]);
      }
      for (size_t m = 0; m < losses.size(); ++m) {
        sharded.start_backward(m + 1 == losses.size());
        losses[m].backward();
        sharded.finish_backward();
      }
      sharded.finish(0.01);
      plain_step(plain, world, turn, 2);
      expect_equal_gradients(sharded, *plain, 1e-12);
      descend(net);
      descend(plain);
    }
  }
}

TEST(FullyShardOrder, AGraphMayBeDerivedTwice) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Net net(1, 3);
  Net plain(1, 3);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  sharded.begin();
  Tensor loss;
  {
    const auto scope = sharded.forward_scope();
    loss = square_loss(*net, rows_of(rank, 0));
  }
  for (const bool last : {false, true}) {
    sharded.start_backward(last);
    loss.backward({}, !last);
    sharded.finish_backward();
  }
  sharded.finish(0.01);
  plain_step(plain, communicator->world_size(), 0);
  plain_step(plain, communicator->world_size(), 0);
  expect_equal_gradients(sharded, *plain, 1e-12);
}

// Rank 0's loss uses the first block's output and odd ranks' loss the second's. No loss uses the
// third.
TEST(FullyShardOrder, UnitsThatALossDoesNotReachAreMadeUpFor) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const int world = communicator->world_size();
  Net net(static_cast<uint64_t>(rank) + 1, 3);
  Net plain(1, 3);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  const auto loss_of = [](NetImpl& of, int r, int turn) {
    std::vector<Tensor> hidden{of.hidden(rows_of(r, turn), {})};
    for (int i = 0; i < 3; ++i) {
      hidden.push_back(call_block(of.blocks[static_cast<size_t>(i)], hidden.back()));
    }
    return hidden[r % 2 == 1 ? 2 : 1].square().sum();
  };
  for (int turn = 0; turn < 2; ++turn) {
    sharded.begin();
    Tensor loss;
    {
      const auto scope = sharded.forward_scope();
      loss = loss_of(*net, rank, turn);
    }
    sharded.start_backward(true);
    loss.backward();
    sharded.finish_backward();
    sharded.finish(1);
    for (int r = 0; r < world; ++r) {
      loss_of(*plain, r, turn).backward();
    }
    expect_equal_gradients(sharded, *plain, 1e-12);
    EXPECT_FALSE(net->blocks[2]->up->weight.grad().defined());
    descend(net);
    descend(plain);
  }
}

TEST(FullyShardOrder, AForwardThatThrowsLeavesTheNextStepRight) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const int world = communicator->world_size();
  Net net(static_cast<uint64_t>(rank) + 1, 3);
  Net plain(1, 3);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  for (int turn = 0; turn < 3; ++turn) {
    shard_step(sharded, net, rank, turn);
    plain_step(plain, world, turn);
    expect_equal_gradients(sharded, *plain, 1e-12);
    descend(net);
    descend(plain);
    net->blocks[1]->throws = true;
    EXPECT_THROW(shard_step(sharded, net, rank, turn), std::runtime_error);
    net->blocks[1]->throws = false;
    if (turn == 1) {
      sharded.cancel();
    }
    EXPECT_EQ(net->blocks[1]->up->weight.size(0), sharded.parameters()[11].rows);
  }
  // An error in the middle of a window loses that batch only.
  sharded.begin();
  for (const int m : {0, 1, 2}) {
    net->blocks[2]->throws = m == 1;
    try {
      Tensor loss;
      {
        const auto scope = sharded.forward_scope();
        loss = square_loss(*net, rows_of(rank, m));
      }
      sharded.start_backward(m == 2);
      loss.backward();
      sharded.finish_backward();
    } catch (const std::runtime_error&) {
      EXPECT_EQ(m, 1);
    }
  }
  sharded.finish(0.01);
  plain_step(plain, world, 0);
  plain_step(plain, world, 2);
  expect_equal_gradients(sharded, *plain, 1e-12);
}

TEST(FullyShardOrder, EvaluationGathersAndLetsGo) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const bool alone = communicator->world_size() == 1;
  Net net(static_cast<uint64_t>(rank) + 1, 3);
  Net plain(1, 3);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    const auto scope = sharded.forward_scope();
    return net->forward(rows_of(rank, 0));
  };
  const Tensor wanted = plain->forward(rows_of(rank, 0));
  sharded.reset_report();
  EXPECT_LE((evaluate() - wanted).abs().max().item<double>(), 1e-12);
  EXPECT_EQ(sharded.report().unsharded_parameter_bytes, 0);
  EXPECT_EQ(gathers_of(sharded), alone ? Counts(4, 0) : Counts(4, 1));
  // Inside a window between its batches, and without gradients.
  shard_step(sharded, net, rank, 1);
  EXPECT_LE((evaluate() - wanted).abs().max().item<double>(), 1e-12);
  {
    const auto scope = sharded.forward_scope();
    EXPECT_LE((net->forward(rows_of(rank, 0)) - wanted).abs().max().item<double>(), 1e-12);
  }
  EXPECT_EQ(sharded.report().unsharded_parameter_bytes, 0) << "an optimizer may step";
  plain_step(plain, communicator->world_size(), 1);
  expect_equal_gradients(sharded, *plain, 1e-12);
}

// The blocks have equal size. With more blocks, only the memory of the shards grows.
TEST(FullyShardOrder, WholeParametersTakeAFewUnitsWhateverTheDepth) {
  install_memory_meter();
  auto communicator = testing_support::fresh_communicator_without_memory();
  const int world = communicator->world_size();
  if (world == 1) {
    return; // one rank shards nothing
  }
  const auto train = [&](int depth, int prefetch) {
    torch::manual_seed(1);
    torch::nn::Sequential net;
    for (int i = 0; i < depth; ++i) {
      net->push_back(torch::nn::Linear(256, 256)); // 257 KiB
    }
    on_device::moved(net);
    FullyShard sharded(communicator, net.ptr(), repeated_blocks(*net), {.prefetch = prefetch});
    const Tensor x = on_device::randn({2, 256});
    const int64_t unit = 4 * 257 * 256;
    int64_t most = 0;
    for (int turn = 0; turn < 2; ++turn) {
      const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
      reset_peak_memory(testing_support::run_device());
      sharded.begin();
      Tensor loss;
      {
        const auto scope = sharded.forward_scope();
        loss = net->forward(x).square().sum();
      }
      EXPECT_LT(sharded.report().unsharded_parameter_bytes, 2 * unit) << "the last block alone";
      sharded.start_backward(true);
      loss.backward();
      sharded.finish_backward();
      sharded.finish(1);
      most = memory_stats(testing_support::run_device()).peak_bytes - before;
      net->zero_grad();
    }
    const int64_t buffers = sharded.report().buffer_bytes;
    EXPECT_LE(buffers, 9 * unit);
    for (int i = 0; i < 500 && sharded.report().buffer_bytes > 0; ++i) {
      sharded.release_buffers(); // Gloo's threads free the buffers a little later
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(sharded.report().buffer_bytes, 0);
    // The memory after the step (padded shards and their gradients), and the largest additional
    // memory in the second step.
    return std::make_pair(memory_stats(testing_support::run_device()).live_bytes, most + buffers);
  };
  for (const int prefetch : {0, 1}) {
    const auto [few, few_most] = train(4, prefetch);
    const auto [many, many_most] = train(24, prefetch);
    const int64_t shard = 4 * ((256 + world - 1) / world) * 257 + 4 * 64;
    EXPECT_LE(many - few, 20 * (2 * shard + 4096));
    EXPECT_LE(many_most, few_most + 8 * 4 * 257 * 256)
        << "not by a unit for each of 20 blocks more";
  }
}

} // namespace hasten::shard_test
