// A module's buffers after the gradients are summed.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "parallel/ddp_rig.h"
#include "support/on_device.h"

namespace hasten::ddp_test {

struct CountedImpl : torch::nn::Module {
  CountedImpl() {
    weight = register_parameter("weight", on_device::ones({3}, torch::kDouble));
    statistics = register_buffer("statistics", on_device::zeros({2, 3}));
    half = register_buffer("half", on_device::zeros({2}, torch::kBFloat16));
    counter = register_buffer("counter", on_device::zeros({}, torch::kLong));
  }
  // A forward of rank r writes values that depend on r into its buffers.
  Tensor loss(int r) {
    torch::NoGradGuard no_grad;
    statistics.fill_(r + 1);
    half.fill_(r + 1);
    counter.fill_(10 * (r + 1));
    torch::AutoGradMode grad(true);
    return weight.sum();
  }
  Tensor weight, statistics, half, counter;
};
TORCH_MODULE(Counted);

struct BufferRig {
  explicit BufferRig(BroadcastBuffers policy)
      : communicator(fresh_communicator()),
        world(communicator->world_size()),
        rank(communicator->rank()),
        ddp(communicator, net.ptr(), {.broadcast_buffers = policy}) {}
  void step(const DdpRanks& ranks = {}) {
    ddp.begin();
    const Tensor loss = net->loss(rank);
    ddp.start_backward(true);
    if (ranks.here) {
      loss.backward();
    }
    ddp.finish_backward();
    ddp.finish(1, ranks);
  }
  void expect(double statistics, int64_t counter) {
    EXPECT_TRUE(torch::equal(net->statistics, on_device::full({2, 3}, statistics, torch::kFloat)))
        << net->statistics;
    EXPECT_TRUE(torch::equal(net->half, on_device::full({2}, statistics, torch::kBFloat16)))
        << net->half;
    EXPECT_EQ(net->counter.item<int64_t>(), counter);
  }
  std::shared_ptr<Communicator> communicator;
  int world, rank;
  Counted net{};
  Ddp ddp;
};

TEST(DdpBuffers, AreRankZerosAfterEverySum) {
  BufferRig rig(BroadcastBuffers::on);
  rig.step();
  rig.expect(1, 10);
  rig.net->loss(rig.rank);
  rig.ddp.sync_buffers(); // in the middle of a window
  rig.expect(1, 10);
}

// Rank 0 ran out of batches, so its buffers are out of date.
TEST(DdpBuffers, AreThoseOfTheFirstRankWithABatch) {
  BufferRig rig(BroadcastBuffers::on);
  if (rig.world > 1) {
    rig.step({.first = 1, .count = rig.world - 1, .here = rig.rank > 0});
    rig.expect(2, 20);
  }
}

TEST(DdpBuffers, AverageLeavesIntegersAlone) {
  BufferRig rig(BroadcastBuffers::average);
  rig.step();
  rig.expect((rig.world + 1) / 2.0, 10);
  if (rig.world > 1) { // the mean of ranks 1, 2, ...
    rig.step({.first = 1, .count = rig.world - 1, .here = rig.rank > 0});
    rig.expect((rig.world + 2) / 2.0, 20);
  }
}

TEST(DdpBuffers, LeaveLeavesThem) {
  BufferRig rig(BroadcastBuffers::off);
  rig.step();
  rig.expect(rig.rank + 1, 10 * (rig.rank + 1));
}

// Integer buffers are sent only after a rank has written them.
TEST(DdpBuffers, IntegersAloneAreSentOnceTheyChange) {
  struct Positions : torch::nn::Module {
    Positions() {
      weight = register_parameter("weight", on_device::ones({3}));
      positions = register_buffer("positions", on_device::arange(4));
    }
    Tensor weight, positions;
  };
  auto communicator = fresh_communicator();
  auto net = std::make_shared<Positions>();
  Ddp ddp(communicator, net);
  for (int turn = 0; turn < 3; ++turn) {
    if (turn == 1 && communicator->rank() == communicator->world_size() - 1) {
      net->positions.fill_(7);
    }
    reduce_once(ddp, communicator->rank(), [&](int) { return net->weight.sum(); });
    const int64_t last = communicator->world_size() == 1 && turn > 0 ? 7 : 3;
    EXPECT_EQ(net->positions[3].item<int64_t>(), last) << turn;
  }
}

// A parameter that no rank uses has the same gradient on all ranks, also in later windows. Buffers
// are compared for any graph.
TEST(DdpBuffers, AStaticGraphAgreesInEveryWindow) {
  struct Marked : torch::nn::Module {
    Marked() {
      weight = register_parameter("weight", on_device::ones({3}));
      unused = register_parameter("unused", on_device::ones({2}));
      seen = register_buffer("seen", on_device::zeros({4}, torch::kBool));
    }
    Tensor weight, unused, seen;
  };
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  auto net = std::make_shared<Marked>();
  Ddp ddp(communicator, net, {.static_graph = true});
  for (int turn = 0; turn < 4; ++turn) {
    net->zero_grad();
    const bool odd_one = turn == 2 && rank == communicator->world_size() - 1;
    if (odd_one) {
      net->unused.mutable_grad() = on_device::zeros({2});
    }
    reduce_once(ddp, rank, [&](int) {
      const torch::NoGradGuard no_grad;
      net->seen[turn].fill_(rank == 0 ? turn % 2 == 1 : turn % 2 == 0);
      const torch::AutoGradMode grad(true);
      return net->weight.sum();
    });
    EXPECT_EQ(net->seen[turn].item<bool>(), turn % 2 == 1) << turn;
    if (communicator->world_size() > 1) {
      EXPECT_EQ(net->unused.grad().defined(), turn == 2) << turn;
    }
  }
}

} // namespace hasten::ddp_test
