// Special models and graphs: parameters that are unused, frozen, tied or used twice; sparse and
// mixed ones; static graphs; second derivatives. Worlds 1 to 4. Each rank starts from its own
// values.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "parallel/ddp_rig.h"
#include "support/on_device.h"

namespace hasten::ddp_test {

Parts parts_of(const Communicator& communicator) {
  return Parts(static_cast<uint64_t>(communicator.rank()) + 1);
}

TEST(DdpUnused, AnErrorNamesThemOnEveryRank) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  Parts net = parts_of(*communicator);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  const auto loss = [&](int r) { // the last rank does not use part1
    return net->loss(rows_of(r, 6),
                     r == world - 1 ? std::vector<int>{0, 2} : std::vector<int>{0, 1, 2});
  };
  const std::string what = what_of([&] { reduce_once(ddp, communicator->rank(), loss); });
  if (world == 1) {
    EXPECT_EQ(what, "") << "as in a plain loop";
    EXPECT_FALSE(net->parts[1]->weight.grad().defined());
    return;
  }
  EXPECT_NE(what.find("rank " + std::to_string(world - 1) + ": no gradient for parameter"),
            std::string::npos)
      << what;
  EXPECT_NE(what.find("\"part1.bias\""), std::string::npos) << what;
  EXPECT_NE(what.find("\"part1.weight\""), std::string::npos) << what;
  EXPECT_EQ(what.find("part0"), std::string::npos) << what;
  EXPECT_NE(what.find("find_unused_parameters"), std::string::npos) << what;
  communicator->barrier("nobody hangs, the group lives");
}

// If only rank 0 uses a parameter, all ranks have its gradient. If no rank uses it, its gradient is
// undefined, so an optimizer with weight decay skips it, as in one process.
TEST(DdpUnused, AllowedTheyAreAsInOneProcess) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  const int rank = communicator->rank();
  for (const bool fixed : {false, true}) {
    Parts net = parts_of(*communicator);
    DdpOptions options = kTinyBuckets;
    options.find_unused_parameters = !fixed;
    options.static_graph = fixed;
    Ddp ddp(communicator, net.ptr(), options);
    Parts plain(1);
    const auto loss_of = [](Parts& model, int turn) {
      return [&model, turn](int r) {
        return model->loss(rows_of(r, 6, turn),
                           r == 0 ? std::vector<int>{1, 0} : std::vector<int>{0});
      };
    };
    const auto sgd = torch::optim::SGDOptions(0.1).weight_decay(0.5);
    torch::optim::SGD optimizer(net->parameters(), sgd);
    torch::optim::SGD reference(plain->parameters(), sgd);
    for (int turn = 0; turn < 4; ++turn) {
      reduce_once(ddp, rank, loss_of(net, turn));
      expect_equal_gradients(*net, plain_gradient(*plain, world, loss_of(plain, turn)));
      EXPECT_FALSE(net->parts[2]->weight.grad().defined());
      if (world > 1 && turn > 0) {
        EXPECT_EQ(ddp.reduction().overlapped, 6) << "no bucket waits for what will not come";
      }
      optimizer.step();
      reference.step();
      optimizer.zero_grad();
      reference.zero_grad();
    }
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_LE((net->parameters()[i] - plain->parameters()[i]).abs().max().item<double>(), 1e-12);
    }
  }
}

TEST(DdpUnused, AGradientNobodyZeroedStays) {
  auto communicator = fresh_communicator();
  Parts net = parts_of(*communicator);
  DdpOptions options = kTinyBuckets;
  options.find_unused_parameters = true;
  Ddp ddp(communicator, net.ptr(), options);
  net->parts[2]->bias.mutable_grad() = on_device::full({6}, 3.0, torch::kDouble);
  net->parts[1]->bias.mutable_grad() = on_device::zeros({6}, torch::kDouble);
  reduce_once(ddp, communicator->rank(), [&](int r) { return net->loss(rows_of(r, 6), {0}); });
  EXPECT_TRUE(torch::equal(net->parts[2]->bias.grad(), on_device::full({6}, 3.0, torch::kDouble)));
  EXPECT_EQ(net->parts[1]->bias.grad().abs().sum().item<double>(), 0);
  EXPECT_FALSE(net->parts[1]->weight.grad().defined());
}

TEST(DdpStaticGraph, AnotherGraphIsAnErrorThatNamesTheParameter) {
  auto communicator = fresh_communicator();
  Parts net = parts_of(*communicator);
  DdpOptions options = kTinyBuckets;
  options.static_graph = true;
  Ddp ddp(communicator, net.ptr(), options);
  const auto run = [&](std::vector<int> use) {
    return what_of([&] {
      reduce_once(ddp, communicator->rank(), [&](int r) { return net->loss(rows_of(r, 6), use); });
      net->zero_grad();
    });
  };
  EXPECT_EQ(run({0, 1}), "");
  EXPECT_EQ(run({0, 1}), "");
  const std::string what = run({0});
  if (communicator->world_size() > 1) {
    EXPECT_NE(what.find("\"part1."), std::string::npos) << what;
    EXPECT_NE(what.find("static_graph"), std::string::npos) << what;
  }
}

TEST(DdpFrozen, FreezingBetweenStepsWorksAndUnfreezingIsRefused) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  Parts net = parts_of(*communicator), plain(1);
  net->parts[2]->bias.set_requires_grad(false); // never trains
  plain->parts[2]->bias.set_requires_grad(false);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  for (int turn = 0; turn < 4; ++turn) {
    for (Parts* model : {&net, &plain}) { // part0 is frozen in turns 1 and 2
      for (auto& p : (*model)->parts[0]->parameters()) {
        p.set_requires_grad(turn == 0 || turn == 3);
      }
      (*model)->zero_grad();
    }
    reduce_once(ddp, communicator->rank(),
                [&](int r) { return net->loss(rows_of(r, 6, turn), {0, 1, 2}); });
    expect_equal_gradients(*net, plain_gradient(*plain, world, [&](int r) {
      return plain->loss(rows_of(r, 6, turn), {0, 1, 2});
    }));
    if (world > 1) {
      EXPECT_EQ(ddp.reduction().overlapped, 5);
    }
  }
  net->parts[2]->bias.set_requires_grad(true);
  EXPECT_NE(what_of([&] { ddp.begin(); }).find("\"part2.bias\" was unfrozen"), std::string::npos);
}

TEST(DdpFrozen, OnSomeRanksOnlyIsAnErrorOnAll) {
  auto communicator = fresh_communicator();
  Parts net = parts_of(*communicator);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  net->parts[1]->weight.set_requires_grad(communicator->rank() == 0);
  const std::string what = what_of([&] {
    reduce_once(ddp, communicator->rank(),
                [&](int r) { return net->loss(rows_of(r, 6), {0, 1, 2}); });
  });
  if (communicator->world_size() > 1) {
    EXPECT_NE(what.find("\"part1.weight\" is frozen on some ranks"), std::string::npos) << what;
  }
}

TEST(DdpParameters, ReplacedOrConvertedOnesAreNamed) {
  auto communicator = fresh_communicator();
  Parts net = parts_of(*communicator);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  net->parts[1] = torch::nn::Linear(6, 6);
  net->parts[1]->to(testing_support::run_device(), torch::kDouble);
  net->replace_module("part1", net->parts[1]);
  EXPECT_NE(what_of([&] {
              reduce_once(ddp, communicator->rank(),
                          [&](int r) { return net->loss(rows_of(r, 6), {0, 1, 2}); });
            }).find("parameter \"part1.weight\" was replaced by another tensor"),
            std::string::npos);
  ddp.cancel();
  net->parts[0]->to(testing_support::run_device(), torch::kFloat);
  const std::string what = what_of([&] { ddp.begin(); });
  EXPECT_NE(what.find("\"part0.weight\" is [6, 6] Float"), std::string::npos) << what;
}

// Alternating fp64 and fp32, a table with sparse gradients, a tied weight used by two layers, and a
// layer called twice.
struct MixedImpl : torch::nn::Module {
  explicit MixedImpl(uint64_t seed) {
    torch::manual_seed(seed);
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 6).sparse(true)));
    twice = register_module("twice", torch::nn::Linear(6, 6));
    single = register_module("single", torch::nn::Linear(6, 6));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3)));
    tied = register_parameter("tied", table->weight);
    to(testing_support::run_device(), torch::kDouble);
    single->to(testing_support::run_device(), torch::kFloat);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  Tensor loss(int rank) {
    const Tensor rows = rows_of(rank, 6);
    const Tensor ids = on_device::arange(rows.size(0)) % 9;
    Tensor x = rows + table->forward(ids);
    x = torch::tanh(twice->forward(torch::tanh(twice->forward(x))));
    x = single->forward(x.to(torch::kFloat)).to(torch::kDouble);
    const Tensor image = rows_of(rank, 2 * 5 * 5, 3).view({-1, 2, 5, 5});
    return torch::linear(x, tied).square().sum() + conv->forward(image).square().sum();
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear twice{nullptr}, single{nullptr};
  torch::nn::Conv2d conv{nullptr};
  Tensor tied;
};
TORCH_MODULE(Mixed);

TEST(DdpParameters, MixedTiedTwiceUsedAndSparseOnesAreTheJoinedBatch) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  Mixed net(static_cast<uint64_t>(communicator->rank()) + 1), plain(1);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  EXPECT_EQ(ddp.gradients().layout().groups().size(), 2u);
  for (int turn = 0; turn < 3; ++turn) {
    net->zero_grad();
    plain->zero_grad();
    reduce_once(ddp, communicator->rank(), [&](int r) { return net->loss(r); });
    expect_equal_gradients(*net,
                           plain_gradient(*plain, world, [&](int r) { return plain->loss(r); }),
                           2e-5); // for the fp32 layer; the fp64 layers differ much less
    EXPECT_FALSE(net->table->weight.grad().is_sparse());
  }
}

struct WaveImpl : torch::nn::Module {
  explicit WaveImpl(uint64_t seed) {
    torch::manual_seed(seed);
    waves = register_parameter("waves", torch::randn({6, 3}, torch::kComplexDouble));
    gain = register_parameter("gain", torch::randn({3}, torch::kDouble));
  }
  Tensor loss(int rank) {
    const Tensor rows = rows_of(rank, 6);
    return (rows.to(torch::kComplexDouble).matmul(waves).abs() * gain).square().sum();
  }
  Tensor waves, gain;
};
TORCH_MODULE(Wave);

TEST(DdpParameters, ComplexOnesAreTheJoinedBatch) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  for (const bool hooked : {false, true}) {
    Wave net(static_cast<uint64_t>(communicator->rank()) + 1), plain(1);
    Ddp ddp(communicator, net.ptr(), kTinyBuckets);
    if (hooked) { // it leaves complex numbers alone
      ddp.register_comm_hook(std::make_shared<Bf16CompressHook>());
    }
    EXPECT_TRUE(torch::equal(net->waves, plain->waves)) << "rank 0's";
    reduce_once(ddp, communicator->rank(), [&](int r) { return net->loss(r); });
    const auto wanted = plain_gradient(*plain, world, [&](int r) { return plain->loss(r); });
    EXPECT_LE((net->waves.grad() - wanted[0].second).abs().max().item<double>(), 1e-9);
  }
}

TEST(DdpGraphs, AGradientPenaltyWorksAndCreateGraphIsRefused) {
  auto communicator = fresh_communicator();
  const int world = communicator->world_size();
  Parts net = parts_of(*communicator), plain(1);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  const auto loss_of = [](Parts& model) {
    return [&model](int r) {
      const Tensor x = rows_of(r, 6).requires_grad_();
      const Tensor loss = model->loss(x, {0, 1, 2});
      const auto slope = torch::autograd::grad({loss}, {x}, {}, true, true);
      return loss + slope[0].square().sum();
    };
  };
  reduce_once(ddp, communicator->rank(), loss_of(net));
  // The penalty depends on the last bias only through tanh', as in the plain loop.
  expect_equal_gradients(*net, plain_gradient(*plain, world, loss_of(plain)));
  net->zero_grad();
  ddp.begin();
  const Tensor loss = net->loss(rows_of(0, 6), {0, 1, 2});
  ddp.start_backward(false);
  const std::string what = what_of([&] { loss.backward({}, true, true); });
  EXPECT_NE(what.find("\"part2."), std::string::npos) << what;
  EXPECT_NE(what.find("create_graph"), std::string::npos) << what;
  ddp.cancel();
  net->zero_grad();
}

TEST(DdpGraphs, ARanksOwnGradientOfAnotherShapeIsNamed) {
  auto communicator = fresh_communicator();
  Parts net = parts_of(*communicator);
  Ddp ddp(communicator, net.ptr(), kTinyBuckets);
  net->parts[1]->bias.mutable_grad() = on_device::ones({1}, torch::kDouble);
  EXPECT_NE(what_of([&] { ddp.begin(); }).find("parameter \"part1.bias\" has shape"),
            std::string::npos);
}

} // namespace hasten::ddp_test
