// dtypes, replicas of a sharded model, and AdamW compared with Ddp.
#include <cmath>

#include "hasten/parallel/ddp.h"
#include "parallel/fully_shard_rig.h"
#include "support/on_device.h"

namespace hasten::shard_test {

// A net of fp32 parameters.
Net float_net(uint64_t seed, int depth) {
  Net net(seed, depth);
  net->to(testing_support::run_device(), torch::kFloat);
  return net;
}

Tensor float_loss(NetImpl& net, const Tensor& rows) {
  return net.forward(rows.to(net.weight.scalar_type())).to(torch::kFloat).square().mean();
}

std::vector<Tensor> once_each(const torch::nn::Module& module) {
  std::vector<Tensor> tensors;
  for (const Tensor& tensor : module.parameters()) {
    if (std::none_of(tensors.begin(), tensors.end(),
                     [&](const Tensor& known) { return known.is_same(tensor); })) {
      tensors.push_back(tensor);
    }
  }
  return tensors;
}

TEST(FullyShardPrecision, LossesUnderAdamWAreThoseOfDdp) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const double world = communicator->world_size();
  Net net = float_net(static_cast<uint64_t>(rank) + 1, 3);
  Net copy = float_net(static_cast<uint64_t>(rank) + 11, 3);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  const auto target = copy->named_parameters();
  sharded.for_each_full_parameter([&](const std::string& name, const Tensor& whole) {
    const torch::NoGradGuard no_grad;
    Tensor(target[name]).copy_(whole);
  });
  Ddp ddp(communicator, copy.ptr());
  const auto options = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
  torch::optim::AdamW mine(once_each(*net), options);
  torch::optim::AdamW theirs(once_each(*copy), options);
  for (int turn = 0; turn < 10; ++turn) {
    sharded.begin();
    Tensor loss;
    {
      const auto scope = sharded.forward_scope();
      loss = float_loss(*net, rows_of(rank, turn));
    }
    sharded.start_backward(true);
    loss.backward();
    sharded.finish_backward();
    sharded.finish(1 / world);
    mine.step();
    mine.zero_grad();

    ddp.begin();
    const Tensor other = float_loss(*copy, rows_of(rank, turn));
    ddp.start_backward(true);
    other.backward();
    ddp.finish_backward();
    ddp.finish(1 / world);
    theirs.step();
    theirs.zero_grad();
    EXPECT_NEAR(loss.item<double>(), other.item<double>(),
                1e-5 * (1 + std::abs(other.item<double>())))
        << turn;
  }
}

// Shards stay fp32 and blocks see bf16. bf16 has a mantissa of 8 bits, so the difference is
// about 1 % of the gradient's norm.
TEST(FullyShardPrecision, ComputesInBf16OverFp32Shards) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Net net = float_net(static_cast<uint64_t>(rank) + 1, 3);
  Net plain = float_net(1, 3);
  FullyShardOptions options;
  options.precision.param_dtype = torch::kBFloat16;
  options.precision.output_dtype = torch::kBFloat16;
  options.unit_precision["blocks.1"].param_dtype = torch::kFloat;
  FullyShard sharded(communicator, net.ptr(), blocks_of(net), options);
  for (int turn = 0; turn < 2; ++turn) {
    sharded.begin();
    for (const bool last : {false, true}) {
      Tensor loss;
      {
        const auto scope = sharded.forward_scope();
        EXPECT_EQ(net->weight.scalar_type(), torch::kBFloat16);
        const Tensor hidden = net->hidden(rows_of(rank, turn).to(torch::kBFloat16), {0});
        EXPECT_EQ(hidden.scalar_type(), torch::kBFloat16);
        const Tensor wide = call_block(net->blocks[1], hidden);
        EXPECT_EQ(wide.scalar_type(), torch::kFloat) << "its own precision";
        loss = call_block(net->blocks[2], wide).to(torch::kFloat).square().sum();
      }
      sharded.start_backward(last);
      loss.backward();
      sharded.finish_backward();
    }
    sharded.finish(0.5);
    EXPECT_EQ(net->weight.scalar_type(), torch::kFloat);
    plain->zero_grad();
    for (int r = 0; r < communicator->world_size(); ++r) {
      plain->hidden(rows_of(r, turn).to(torch::kFloat), {0, 1, 2}).square().sum().backward();
    }
    double difference = 0;
    double size = 0;
    for (size_t i = 0; i < sharded.parameters().size(); ++i) {
      const ShardedParameter& entry = sharded.parameters()[i];
      const Tensor wanted = plain->named_parameters()[entry.name].grad();
      if (!wanted.defined()) {
        continue;
      }
      EXPECT_EQ(entry.parameter.grad().scalar_type(), torch::kFloat);
      const Tensor whole = sharded.gather_like(i, entry.parameter.grad());
      difference += (whole - wanted).square().sum().item<double>();
      size += wanted.square().sum().item<double>();
    }
    EXPECT_LT(std::sqrt(difference / size), 0.05);
    EXPECT_GT(difference, 0) << "it was computed in bf16";
    net->zero_grad();
  }
}

// In bf16, 1 + 2^-9 is 1.
TEST(FullyShardPrecision, SumsIn32BitsWhatTravelsIn16) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const int world = communicator->world_size();
  torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(3, 4).bias(false)));
  on_device::moved(net);
  FullyShardOptions options;
  options.precision.reduce_dtype = torch::kBFloat16;
  FullyShard sharded(communicator, net.ptr(), repeated_blocks(*net), options);
  sharded.begin();
  Tensor loss;
  {
    const auto scope = sharded.forward_scope();
    loss = net->forward(on_device::full({1, 3}, rank == 0 ? 1.0 : 1.0 / 512)).sum();
  }
  sharded.start_backward(true);
  loss.backward();
  sharded.finish_backward();
  sharded.finish(1);
  const Tensor whole = sharded.gather_like(0, sharded.parameters()[0].parameter.grad());
  EXPECT_TRUE(
      torch::equal(whole, on_device::full({4, 3}, 1 + static_cast<float>(world - 1) / 512)));
}

TEST(FullyShardPrecision, SixteenBitParametersHaveFp32Gradients) {
  auto communicator = fresh_communicator();
  torch::nn::Sequential net(torch::nn::Linear(3, 5));
  net->to(testing_support::run_device(), torch::kBFloat16);
  FullyShard sharded(communicator, net.ptr(), repeated_blocks(*net));
  sharded.begin();
  Tensor loss;
  {
    const auto scope = sharded.forward_scope();
    loss = net->forward(on_device::ones({2, 3}, torch::kBFloat16)).sum();
  }
  sharded.start_backward(true);
  loss.backward();
  sharded.finish_backward();
  sharded.finish(1);
  for (const ShardedParameter& entry : sharded.parameters()) {
    EXPECT_EQ(entry.parameter.scalar_type(), torch::kBFloat16);
    ASSERT_EQ(entry.parameter.grad().scalar_type(), torch::kFloat);
    EXPECT_TRUE(
        torch::all(entry.parameter.grad() == 2.0 * communicator->world_size()).item<bool>());
  }
}

// Four ranks as two shard groups of two: ranks 0 and 1 share a replica, and so do 2 and 3.
TEST(FullyShardPrecision, ReplicasOfShardsAddUpToo) {
  auto world = fresh_communicator();
  const int rank = world->rank();
  const int ranks = world->world_size();
  if (ranks % 2 != 0) {
    return;
  }
  const int of_group = ranks / 2;
  const int first = rank / of_group * of_group;
  std::vector<int> group;
  for (int i = 0; i < of_group; ++i) {
    group.push_back(first + i);
  }
  CommunicatorOptions options = world->options();
  options.name += " shard";
  auto shard = world->new_group(group, options);
  options.name += " replicas";
  auto replicas = world->new_group({rank % of_group, rank % of_group + of_group}, options);
  {
    Net net(static_cast<uint64_t>(rank) + 1, 3);
    Net plain(1, 3);
    FullyShard sharded(shard, net.ptr(), blocks_of(net), {.replicas = replicas});
    for (int turn = 0; turn < 3; ++turn) {
      shard_step(sharded, net, rank, turn, 2);
      plain_step(plain, ranks, turn, 2);
      expect_equal_gradients(sharded, *plain, 1e-12);
      descend(net);
      descend(plain);
    }
  }
  world->barrier("done");
  replicas->close();
  shard->close();
}

} // namespace hasten::shard_test
