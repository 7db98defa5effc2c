// Training with shards gives the results of one process on all samples.
#include "hasten/parallel/fully_shard.h"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "hasten/comm/forwarding_communicator.h"
#include "hasten/core/gradient_place.h"
#include "hasten/core/linear.h"
#include "parallel/fully_shard_rig.h"
#include "support/on_device.h"

namespace hasten::shard_test {

struct Variant {
  const char* name;
  FullyShardOptions options;
};

std::vector<Variant> variants() {
  return {{"fsdp", {}},
          {"no prefetch", {.prefetch = 0}},
          {"no reshard", {.reshard_after_forward = false}},
          {"zero2", {.strategy = ShardingStrategy::zero2}},
          {"zero1", {.strategy = ShardingStrategy::zero1}},
          {"sync last", {.sync_each_batch = false}}};
}

TEST(FullyShard, TenStepsEqualOneProcessOnTheJoinedBatch) {
  for (const Variant& variant : variants()) {
    for (const int micro : {3, 1}) {
      if (micro == 1 && std::string(variant.name) != "fsdp") {
        continue;
      }
      auto communicator = fresh_communicator(
          {.timeout = std::chrono::seconds(20), .name = variant.name + std::to_string(micro)});
      const int rank = communicator->rank();
      Net net(static_cast<uint64_t>(rank) + 1, 3);
      Net plain(1, 3);
      FullyShard sharded(communicator, net.ptr(), blocks_of(net), variant.options);
      for (int turn = 0; turn < 10; ++turn) {
        shard_step(sharded, net, rank, turn, micro);
        plain_step(plain, communicator->world_size(), turn, micro);
        if (turn == 0) {
          expect_equal_gradients(sharded, *plain, 1e-12);
        }
        descend(net, 0.01); // larger steps would amplify differences in the last bits
        descend(plain, 0.01);
      }
      expect_equal_parameters(sharded, *plain, 1e-10, variant.name);
    }
  }
}

TEST(FullyShard, ParametersAreShardsAtRestAndWholeInTheirBlock) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  Net net(static_cast<uint64_t>(rank) + 1, 2);
  Net plain(1, 2);
  const void* identity = net->blocks[0]->up->weight.unsafeGetTensorImpl();
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  EXPECT_EQ(net->blocks[0]->up->weight.unsafeGetTensorImpl(), identity);
  expect_equal_parameters(sharded, *plain, 0, "rank 0's values");
  EXPECT_EQ(net->named_parameters().keys(), plain->named_parameters().keys());

  int64_t rows = 0; // of the parameters "mix", which have two rows
  int64_t places = 0; // of the parameters without a dimension
  for (const ShardedParameter& entry : sharded.parameters()) {
    const int64_t all = entry.sizes.empty() ? 1 : entry.sizes[0];
    const int64_t chunk = (all + world - 1) / world;
    EXPECT_EQ(entry.first_row, std::min(all, rank * chunk)) << entry.name;
    EXPECT_EQ(entry.rows, std::min(all, (rank + 1) * chunk) - entry.first_row);
    if (world > 1) {
      EXPECT_EQ(entry.parameter.size(0), entry.rows) << entry.name;
      EXPECT_EQ(entry.parameter.dim(), std::max<int64_t>(1, entry.sizes.size()));
    }
    rows += entry.name == "blocks.0.mix" ? entry.rows : 0;
    places += entry.name == "blocks.1.gain" ? entry.rows : 0;
  }
  Tensor held = on_device::tensor({rows, places});
  communicator->all_reduce(held, ReduceOp::SUM, "rows");
  EXPECT_TRUE(torch::equal(held, on_device::tensor({2, 1})));

  const Tensor before = net->blocks[0]->up->weight.detach().clone();
  sharded.begin();
  Tensor loss;
  {
    const auto scope = sharded.forward_scope();
    EXPECT_EQ(net->weight.size(0), kWide) << "the root's, in the scope";
    EXPECT_TRUE(torch::equal(net->blocks[0]->up->weight, before));
    loss = square_loss(*net, rows_of(rank, 0));
    EXPECT_TRUE(torch::equal(net->blocks[0]->up->weight, before));
  }
  if (world > 1) {
    EXPECT_EQ(net->weight.size(0), kWide) << "until backward has ended";
    EXPECT_EQ(net->blocks[1]->up->weight.size(0), 10) << "backward begins with the last block";
    EXPECT_TRUE(torch::equal(net->blocks[0]->up->weight, before));
  }
  sharded.start_backward(true);
  loss.backward();
  sharded.finish_backward();
  EXPECT_EQ(sharded.report().unsharded_parameter_bytes, 0);
  sharded.finish(1);
  for (const ShardedParameter& entry : sharded.parameters()) {
    if (entry.parameter.requires_grad()) {
      EXPECT_EQ(entry.parameter.grad().sizes(), entry.parameter.sizes()) << entry.name;
    } else {
      EXPECT_FALSE(entry.parameter.grad().defined()) << entry.name;
    }
  }
}

// On a device, a large gradient goes as it is only if ranks divide its rows and it is not cast.
TEST(FullyShard, LargeParametersTravelAloneAndExactly) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  // Numbers of rows that 2, 3 and 4 divide, and others. The last weight is frozen.
  const auto make = [](uint64_t seed) {
    torch::manual_seed(seed);
    torch::nn::Sequential net(torch::nn::Linear(400, 1200), torch::nn::Linear(1200, 401),
                              torch::nn::Linear(401, 399));
    net[2]->as<torch::nn::Linear>()->weight.set_requires_grad(false);
    net->to(testing_support::run_device(), torch::kDouble);
    return net;
  };
  struct Row {
    std::optional<at::ScalarType> param;
    std::optional<at::ScalarType> reduce;
    double tolerance;
  };
  for (const Row& row : {Row{{}, {}, 1e-13}, Row{torch::kFloat, {}, 1e-5},
                         Row{torch::kFloat, torch::kFloat, 1e-5}, Row{{}, torch::kFloat, 1e-6}}) {
    FullyShardOptions options;
    options.precision.param_dtype = row.param;
    options.precision.reduce_dtype = row.reduce;
    options.precision.output_dtype = torch::kDouble;
    for (const bool blocks : {true, false}) { // three units, then one
      auto net = make(static_cast<uint64_t>(rank) + 1);
      auto plain = make(1);
      FullyShard sharded(communicator, net.ptr(),
                         blocks ? repeated_blocks(*net) : decltype(repeated_blocks(*net))(),
                         options);
      expect_equal_parameters(sharded, *plain, 0);
      sharded.begin();
      for (const int turn : {0, 1}) { // the second is added to the first
        Tensor loss;
        {
          const auto scope = sharded.forward_scope();
          const Tensor x = rows_of(rank, turn, 400);
          loss = net->forward(x.to(row.param.value_or(torch::kDouble))).square().sum();
        }
        sharded.start_backward(turn == 1);
        loss.backward();
        sharded.finish_backward();
        for (int r = 0; r < communicator->world_size(); ++r) {
          plain->forward(rows_of(r, turn, 400)).square().sum().backward();
        }
      }
      sharded.finish(1);
      const auto wanted = plain->named_parameters();
      for (size_t i = 0; i < sharded.parameters().size(); ++i) {
        const ShardedParameter& entry = sharded.parameters()[i];
        const Tensor gradient = wanted[entry.name].grad();
        ASSERT_EQ(entry.parameter.grad().defined(), gradient.defined()) << entry.name;
        if (gradient.defined()) {
          const Tensor difference = sharded.gather_like(i, entry.parameter.grad()) - gradient;
          EXPECT_LE((difference.norm() / gradient.norm()).item<double>(), row.tolerance)
              << entry.name;
        }
      }
    }
  }
}

// One weight serves two layers, one has rows that 2, 3 and 4 ranks do not divide, and one is small.
struct PlacedNet : torch::nn::Module {
  explicit PlacedNet(uint64_t seed) {
    torch::manual_seed(seed);
    for (const auto& [name, rows] : {std::pair<const char*, int64_t>{"last", 1536},
                                     {"twice", 1536},
                                     {"odd", 1537},
                                     {"small", 64}}) {
      weights[name] = register_parameter(name, torch::randn({rows, 1024}) / 32);
    }
  }
  Tensor loss(int rank, int turn, at::ScalarType dtype) const {
    Tensor x = rows_of(rank, turn, 1024).repeat({32, 1}).to(dtype);
    const auto layer = [&](const char* name) {
      return fast_linear(torch::tanh(x), weights.at(name).to(dtype));
    };
    for (const char* name : {"twice", "twice", "odd", "last"}) {
      x = layer(name).narrow(1, 0, 1024);
    }
    return x.square().sum() + layer("small").square().sum();
  }
  std::map<std::string, Tensor> weights{};
};

// Remembers from where gradients are sent.
class SendersOf final : public ForwardingCommunicator {
 public:
  using Places = std::set<const void*>;
  SendersOf(std::shared_ptr<Communicator> inner, std::shared_ptr<Places> places)
      : ForwardingCommunicator(std::move(inner)), places_(std::move(places)) {}

  Work start_together(const std::vector<Collective>& what) override {
    for (const Collective& one : what) {
      if (one.kind == Collective::Kind::reduce_scatter) {
        places_->insert(one.input.const_data_ptr());
      }
    }
    return ForwardingCommunicator::start_together(what);
  }
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    return std::make_shared<SendersOf>(inner_->duplicate(options), places_);
  }

 private:
  std::shared_ptr<Places> places_;
};

TEST(FullyShard, LayersMakeLargeGradientsWhereTheyAreSentFrom) {
  if (!testing_support::run_device().is_cpu()) {
    GTEST_SKIP() << "gradients are made in place on CPUs";
  }
  const auto sent = std::make_shared<SendersOf::Places>();
  const auto communicator = std::make_shared<SendersOf>(fresh_communicator(), sent);
  const int world = communicator->world_size();
  PlacedNet plain(1);
  Tensor sum = torch::zeros({}, torch::kDouble);
  for (int i = 0; i < 2 * world; ++i) {
    sum = sum + plain.loss(i / 2, i % 2, at::kDouble);
  }
  sum.backward();
  for (const auto strategy : {ShardingStrategy::fsdp, ShardingStrategy::zero1}) {
    auto net = std::make_shared<PlacedNet>(static_cast<uint64_t>(communicator->rank()) + 1);
    FullyShardOptions options;
    options.strategy = strategy;
    FullyShard sharded(communicator, net, {}, options);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      sharded.begin();
      std::map<std::string, std::vector<const void*>> given;
      for (const int turn : {0, 1}) {
        const detail::GradientPlaceScope scope([&](const Tensor& parameter) {
          const Tensor place = sharded.reserve_gradient_place(parameter);
          for (const auto& [name, weight] : net->weights) {
            if (weight.is_same(parameter) && place.defined()) {
              given[name].push_back(place.const_data_ptr());
            }
          }
          return place;
        });
        Tensor loss;
        {
          const auto forward = sharded.forward_scope();
          loss = net->loss(communicator->rank(), turn, at::kFloat);
        }
        sharded.start_backward(turn == 1);
        loss.backward();
        sharded.finish_backward();
      }
      sharded.finish(1);
      // zero1 has a part of the sum from the second batch on.
      const size_t batches = world == 1 ? 0 : strategy == ShardingStrategy::fsdp ? 2 : 1;
      EXPECT_EQ(given["last"].size(), batches);
      EXPECT_EQ(given["twice"].size(), 2 * batches);
      EXPECT_EQ(given["odd"].size() + given["small"].size(), 0u);
      for (const void* place : given["last"]) {
        EXPECT_TRUE(sent->contains(place));
      }
      for (size_t i = 0; i < sharded.parameters().size(); ++i) {
        const ShardedParameter& entry = sharded.parameters()[i];
        const Tensor wanted = plain.weights.at(entry.name).grad();
        const Tensor difference = sharded.gather_like(i, entry.parameter.grad()) - wanted;
        EXPECT_LE((difference.norm() / wanted.norm()).item<double>(), 1e-5) << entry.name;
      }
    }
  }
}

TEST(FullyShard, AUnitMayHaveParametersOfTwoDtypes) {
  auto communicator = fresh_communicator();
  const auto make = [](uint64_t seed) {
    torch::manual_seed(seed);
    torch::nn::Sequential net(torch::nn::Linear(6, 5), torch::nn::Linear(5, 3));
    net->to(testing_support::run_device());
    net[1]->to(torch::kDouble);
    return net;
  };
  const auto outputs = [](torch::nn::Sequential& net) {
    const Tensor x = on_device::ones({2, 6});
    return net[1]->as<torch::nn::Linear>()->forward(
        net[0]->as<torch::nn::Linear>()->forward(x).to(torch::kDouble));
  };
  auto net = make(static_cast<uint64_t>(communicator->rank()) + 1);
  auto plain = make(1);
  FullyShard sharded(communicator, net.ptr(), {});
  expect_equal_parameters(sharded, *plain, 0);
  const torch::NoGradGuard no_grad;
  const auto scope = sharded.forward_scope();
  EXPECT_TRUE(torch::equal(outputs(net), outputs(plain)));
}

TEST(FullyShard, RunningStatisticsAreEqualWhenASumIsComplete) {
  for (const BroadcastBuffers policy : {BroadcastBuffers::on, BroadcastBuffers::average}) {
    auto communicator =
        fresh_communicator({.timeout = std::chrono::seconds(20),
                            .name = policy == BroadcastBuffers::average ? "average" : "broadcast"});
    const int world = communicator->world_size();
    torch::nn::Sequential net(torch::nn::BatchNorm1d(6));
    net->to(testing_support::run_device(), torch::kDouble);
    FullyShard sharded(communicator, net.ptr(), repeated_blocks(*net),
                       {.broadcast_buffers = policy});
    const auto rows = [](int rank) { return on_device::full({2, 6}, rank + 1, torch::kDouble); };
    sharded.begin();
    Tensor loss;
    {
      const auto scope = sharded.forward_scope();
      loss = net->forward(rows(communicator->rank())).sum();
    }
    sharded.start_backward(true);
    loss.backward();
    sharded.finish_backward();
    sharded.finish(1);
    // A momentum of 0.1 from 0 towards the batch's mean.
    const double mean = policy == BroadcastBuffers::average ? (world + 1) / 2.0 : 1;
    EXPECT_NEAR(net->named_buffers()["0.running_mean"].mean().item<double>(), 0.1 * mean, 1e-12);
  }
}

TEST(FullyShard, GradientsAddToWhatNobodyZeroed) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Net net(1, 2);
  Net plain(1, 2);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  shard_step(sharded, net, rank, 0);
  shard_step(sharded, net, rank, 1); // without zero_grad
  plain_step(plain, communicator->world_size(), 0);
  plain_step(plain, communicator->world_size(), 1);
  expect_equal_gradients(sharded, *plain, 1e-12);
  // A further backward in the same window.
  Tensor loss;
  {
    const auto scope = sharded.forward_scope();
    loss = square_loss(*net, rows_of(rank, 2));
  }
  sharded.start_backward(true);
  loss.backward();
  sharded.finish_backward();
  sharded.finish(0.01);
  plain_step(plain, communicator->world_size(), 2);
  expect_equal_gradients(sharded, *plain, 1e-12);
}

TEST(FullyShard, AWindowThatIsSavedGoesOnToTheLastBit) {
  for (const bool each : {true, false}) {
    auto communicator =
        fresh_communicator({.timeout = std::chrono::seconds(20), .name = each ? "each" : "last"});
    const int rank = communicator->rank();
    Net net(1, 2);
    FullyShard sharded(communicator, net.ptr(), blocks_of(net), {.sync_each_batch = each});
    const auto batch = [&](FullyShard& on, Net& of, int m, bool last) {
      Tensor loss;
      {
        const auto scope = on.forward_scope();
        loss = square_loss(*of, rows_of(rank, m));
      }
      on.start_backward(last);
      loss.backward();
      on.finish_backward();
    };
    shard_step(sharded, net, rank, 5); // begin() keeps these gradients apart
    sharded.begin();
    batch(sharded, net, 0, false);
    batch(sharded, net, 1, false);
    NamedTensors saved;
    nlohmann::json values;
    sharded.save_state(saved, values);
    for (auto& [name, tensor] : saved) {
      tensor = tensor.clone();
    }
    batch(sharded, net, 2, true);
    sharded.finish(0.5);

    Net again(1, 2);
    FullyShard resumed(communicator, again.ptr(), blocks_of(again), {.sync_each_batch = each});
    resumed.load_state(saved, values);
    batch(resumed, again, 2, true);
    resumed.finish(0.5);
    for (size_t i = 0; i < sharded.parameters().size(); ++i) {
      const Tensor mine = sharded.parameters()[i].parameter.grad();
      const Tensor other = resumed.parameters()[i].parameter.grad();
      ASSERT_EQ(mine.defined(), other.defined());
      EXPECT_TRUE(!mine.defined() || torch::equal(mine, other)) << sharded.parameters()[i].name;
    }
    saved["grad.nowhere"] = on_device::zeros({1});
    EXPECT_TRUE(says(what_of([&] { resumed.load_state(saved, values); }), "not trainable"));
  }
}

TEST(FullyShard, WholeParametersComeAndGoOneByOne) {
  auto communicator = fresh_communicator();
  Net net(1, 2);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  std::vector<std::string> names;
  sharded.for_each_full_parameter([&](const std::string& name, const Tensor& whole) {
    names.push_back(name);
    sharded.load_parameter(name, torch::ones_like(whole) * 3);
  });
  EXPECT_EQ(names[0], "weight") << "tied: once, under its first name";
  EXPECT_EQ(names.size(), 1u + 2 * 7);
  EXPECT_EQ(sharded.gather_parameter("blocks.1.gain").item<double>(), 3);
  for (const auto& parameter : net->parameters()) {
    EXPECT_TRUE(torch::all(parameter == 3).item<bool>());
  }
  EXPECT_TRUE(
      says(what_of([&] { sharded.load_parameter("weight", on_device::ones({2})); }), "[6, 5]"));
  EXPECT_TRUE(says(what_of([&] { (void)sharded.gather_parameter("no"); }), "\"no\""));
  EXPECT_EQ(sharded.report().unsharded_gradient_bytes, 8 * (30 + 2 * (60 + 10 + 60 + 6 + 1 + 12)));
}

TEST(FullyShard, UnshardAndReshardChangeEveryParameterBetweenForwards) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  Net net(static_cast<uint64_t>(communicator->rank()) + 1, 2);
  const Net plain(1, 2);
  const auto sharded = fully_shard(net, communicator, {.prefetch = 0});
  ASSERT_EQ(sharded->report().units.size(), 3u) << "two blocks and the root";
  const auto shards = [&] {
    std::vector<std::vector<int64_t>> sizes;
    for (const ShardedParameter& entry : sharded->parameters()) {
      sizes.push_back(entry.parameter.sizes().vec());
    }
    return sizes;
  };
  const auto at_rest = shards();
  EXPECT_TRUE(sharded->unshard());
  for (const auto& wanted : plain->named_parameters()) {
    EXPECT_TRUE(torch::equal(net->named_parameters()[wanted.key()], wanted.value()))
        << wanted.key();
  }
  {
    const torch::NoGradGuard no_grad;
    const auto scope = sharded->forward_scope();
    EXPECT_FALSE(sharded->reshard()) << "in a forward";
    EXPECT_FALSE(sharded->unshard()) << "in a forward";
    (void)net->forward(rows_of(0, 0));
  }
  EXPECT_EQ(gathers_of(*sharded), Counts(3, world > 1)) << "the forward gathers nothing again";
  EXPECT_TRUE(sharded->reshard());
  EXPECT_EQ(shards(), at_rest);
  EXPECT_EQ(sharded->report().unsharded_parameter_bytes, 0);
  EXPECT_TRUE(sharded->unshard());
  shard_step(*sharded, net, communicator->rank(), 0);
  plain_step(plain, world, 0);
  expect_equal_gradients(*sharded, *plain, 1e-12);
}

TEST(FullyShard, NormsAndOverflowsAreThoseOfTheWholeGradient) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Net net(1, 2);
  Net plain(1, 2);
  FullyShard sharded(communicator, net.ptr(), blocks_of(net));
  shard_step(sharded, net, rank, 0);
  plain_step(plain, communicator->world_size(), 0);
  std::vector<Tensor> all;
  for (const auto& entry : sharded.parameters()) {
    const Tensor gradient = plain->named_parameters()[entry.name].grad();
    if (gradient.defined()) {
      all.push_back(gradient.reshape({-1}));
    }
  }
  const Tensor joined = torch::cat(all);
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double p : {1.0, 2.0, 3.0, infinity}) {
    EXPECT_NEAR(sharded.grad_norm(p), joined.norm(p).item<double>(), 1e-6 * joined.numel()) << p;
  }
  const int last = communicator->world_size() - 1;
  for (const double p : {2.0, infinity}) {
    std::vector<double> norms{rank == last ? std::nan("") : 1, 1};
    sharded.reduce_norms(norms, p);
    EXPECT_TRUE(std::isnan(norms[0])) << p;
    EXPECT_TRUE(std::isfinite(norms[1])) << p;
  }
}

} // namespace hasten::shard_test
