// A model that cannot be sharded, or a wrong use, is an error on every rank.
#include "hasten/base/log.h"
#include "parallel/fully_shard_rig.h"
#include "support/on_device.h"

namespace hasten::shard_test {

TEST(FullyShardInput, ModelsThatDifferAreNamed) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  if (world == 1) {
    return;
  }
  const bool last = communicator->rank() == world - 1;
  Net net(1, 2);
  if (last) {
    net->blocks[1]->register_parameter("more", on_device::zeros({3}));
  }
  EXPECT_TRUE(says(what_of([&] { FullyShard sharded(communicator, net.ptr(), blocks_of(net)); }),
                   "\"blocks.1.more\""));
  Net other(1, 2);
  auto blocks = blocks_of(other);
  if (last) {
    blocks.pop_back();
  }
  EXPECT_TRUE(says(what_of([&] { FullyShard sharded(communicator, other.ptr(), blocks); }),
                   "in unit \"\""));
}

TEST(FullyShardInput, UnitsAndOptionsThatCannotBe) {
  auto communicator = fresh_communicator();
  Net net(1, 2);
  const auto make = [&](const std::vector<std::shared_ptr<torch::nn::Module>>& blocks,
                        FullyShardOptions options = {}) {
    return what_of([&] { FullyShard sharded(communicator, net.ptr(), blocks, options); });
  };
  EXPECT_TRUE(says(make({nullptr}), "null"));
  EXPECT_TRUE(says(make({net.ptr()}), "the model itself"));
  EXPECT_TRUE(says(make({Awkward().ptr()}), "is not in the model"));
  EXPECT_TRUE(says(make({}, {.prefetch = 2}), "prefetch=2"));
  FullyShardOptions options;
  options.precision.param_dtype = torch::kLong;
  EXPECT_TRUE(says(make({}, options), "param_dtype=Long"));
  options = {};
  options.unit_precision["blocks.7"] = {};
  EXPECT_TRUE(says(make({}, options), "\"blocks.7\""));
  net->blocks[1]->register_parameter("tied", net->blocks[0]->gain);
  const std::string tied = make(blocks_of(net));
  EXPECT_TRUE(says(tied, "\"blocks.0.gain\"") && says(tied, "\"blocks.1.tied\"")) << tied;
}

TEST(FullyShardInput, ChangedParametersAreNamedWhenASumBegins) {
  auto communicator = fresh_communicator();
  {
    Net net(1, 2);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net));
    net->blocks[1]->to(testing_support::run_device(), torch::kFloat);
    EXPECT_TRUE(says(what_of([&] { sharded.begin(); }), "\"blocks.1."));
  }
  {
    Net net(1, 2);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net));
    net->blocks[0]->fixed.set_requires_grad(true);
    EXPECT_TRUE(says(what_of([&] { sharded.begin(); }), "unfrozen"));
  }
  {
    Net net(1, 2);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net));
    torch::nn::Linear other(kWide, 10);
    other->to(testing_support::run_device(), torch::kDouble);
    net->blocks[1]->up = net->blocks[1]->replace_module("up", other);
    EXPECT_TRUE(says(what_of([&] { shard_step(sharded, net, communicator->rank(), 0); }),
                     "\"blocks.1.up.weight\""));
  }
}

TEST(FullyShardInput, ParametersAreForTheirBlockAndBackwardForItsPlace) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Net net(1, 2);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  EXPECT_TRUE(says(what_of([&] { sharded.start_backward(true); }), "without a sum"));
  const bool alone = communicator->world_size() == 1; // its shard is the whole tensor
  const auto run = [&](bool penalty) {
    const auto scope = sharded.forward_scope();
    const auto order = alone ? std::vector<int>{1} : std::vector<int>{0, 1};
    const Tensor loss = net->forward(rows_of(rank, 0), order).sum();
    return penalty ? loss + net->blocks[0]->up->weight.square().sum() : loss;
  };
  sharded.begin();
  {
    const Tensor loss = run(false);
    EXPECT_TRUE(says(what_of([&] { loss.backward(); }), "outside"));
  }
  sharded.begin();
  const Tensor loss = run(true);
  sharded.start_backward(true);
  EXPECT_TRUE(says(what_of([&] { loss.backward(); }), "used outside its block"));
  sharded.cancel();
  {
    const auto scope = sharded.forward_scope();
    EXPECT_TRUE(says(what_of([&] { const auto inner = sharded.forward_scope(); }), "already open"));
  }
  shard_step(sharded, net, rank, 0);
}

TEST(FullyShardInput, MoreRanksThanRowsAreWorthAWarning) {
  auto communicator = fresh_communicator();
  if (communicator->world_size() == 1) {
    return;
  }
  auto net = on_device::moved(torch::nn::Sequential(torch::nn::Linear(2, 1)));
  std::string said;
  set_log_sink([&](LogLevel, std::string_view line) { said += line; });
  FullyShard sharded(communicator, net.ptr(), repeated_blocks(*net));
  set_log_sink({});
  EXPECT_TRUE(says(said, "is smaller than the number of ranks")) << said;
}

} // namespace hasten::shard_test
