// After any window, every gradient is in the flat buffers and equals that of the joined batch.
// Worlds 1, 2 and 3; fp64, to 1e-12.
#include "hasten/accumulation/gradient_window.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "accumulation/window_rig.h"
#include "hasten/base/error.h"
#include "hasten/parallel/ddp.h"
#include "support/communicator.h"
#include "support/world.h"

namespace hasten::window_test {

using testing_support::fresh_communicator;

// One rank's model (rank 0's weights after construction) with its window of two
// batches. Small buckets, so that there are several.
struct Rig {
  Rig()
      : communicator(fresh_communicator()),
        world(communicator->world_size()),
        rank(communicator->rank()),
        net(net_of_seed(static_cast<uint64_t>(rank) + 1)),
        ddp(std::make_shared<Ddp>(
            communicator, net.ptr(),
            DdpOptions{
                .bucket_cap_mb = 2e-4, .first_bucket_mb = 1e-4, .find_unused_parameters = true})),
        shared(std::make_shared<WindowShared>()),
        window(communicator, {ddp}, 1, {.steps = 2}, at::kCPU, shared) {}

  Tensor loss(const Rows& batch) { return loss_mean(net->forward(batch.x), batch.y); }
  void open(const Rows& batch, bool data_ends = false) {
    window.open({.data_ends = data_ends,
                 .weight = static_cast<double>(batch.count()),
                 .rows = batch.count()});
  }
  // One batch of this rank, mean loss.
  void micro(int64_t number, int64_t index, bool data_ends = false) {
    const Rows batch = make_rows(number, rank, index);
    open(batch, data_ends);
    window.backward(loss(batch), std::nullopt, {});
    window.close();
  }
  // All ranks' batches of a window.
  std::vector<Rows> joined(int64_t number, int64_t batches = 2, int ranks = 0) {
    std::vector<Rows> rows;
    for (int r = 0; r < (ranks > 0 ? ranks : world); ++r) {
      for (int64_t m = 0; m < batches; ++m) {
        rows.push_back(make_rows(number, r, m));
      }
    }
    return rows;
  }

  void expect(const std::map<std::string, Tensor>& wanted, double times = 1) {
    ASSERT_TRUE(window.is_complete());
    const FlatGradients& flat = ddp->gradients();
    for (const auto& item : net->named_parameters()) {
      const Tensor& p = item.value();
      if (!p.requires_grad()) {
        EXPECT_FALSE(p.grad().defined()) << item.key();
        continue;
      }
      const Tensor& mean = wanted.at(item.key());
      if (!mean.defined()) { // if no rank uses it, as in one process
        EXPECT_FALSE(p.grad().defined()) << item.key();
        continue;
      }
      const int64_t slot = flat.layout().find(p);
      ASSERT_GE(slot, 0) << item.key();
      if (world > 1) { // in a world of one rank, autograd's tensors stay
        ASSERT_TRUE(flat.installed(slot)) << item.key();
        EXPECT_EQ(reinterpret_cast<uintptr_t>(p.grad().const_data_ptr()) % 64, 0u);
      }
      EXPECT_LE((p.grad() - mean * times).abs().max().item<double>(), 1e-12) << item.key();
    }
  }

  std::shared_ptr<Communicator> communicator;
  int world, rank;
  TiedNet net;
  std::shared_ptr<Ddp> ddp;
  std::shared_ptr<WindowShared> shared;
  GradientWindow window;
};

TEST(GradientWindow, IsTheJoinedBatchWhoeverZeroesTheGradients) {
  Rig rig;
  ASSERT_GE(rig.ddp->bucket_sizes().size(), 3u);
  torch::optim::SGD sgd(rig.net->parameters(), 0.1);
  const std::vector<std::function<void()>> ways{
      [&] { sgd.zero_grad(); },
      [&] { sgd.zero_grad(false); },
      [&] { rig.net->zero_grad(); },
      [&] { rig.net->zero_grad(false); },
      [&] {
        rig.ddp->gradients().install();
        rig.ddp->gradients().zero_();
      },
      [&] { rig.net->first->weight.mutable_grad().reset(), sgd.zero_grad(false); },
  };
  int64_t number = 0;
  for (const auto& zero_grad : ways) {
    rig.micro(number, 0);
    EXPECT_FALSE(rig.window.is_complete());
    rig.micro(number, 1);
    rig.expect(joined_gradient(rig.joined(number)));
    zero_grad();
    ++number;
  }
}

TEST(GradientWindow, AddsToGradientsNobodyZeroedAsTorchDoes) {
  Rig rig;
  for (int i = 0; i < 3; ++i) {
    rig.micro(0, 0);
    rig.micro(0, 1);
    rig.expect(joined_gradient(rig.joined(0)), i + 1);
  }
}

TEST(GradientWindow, IgnoresAutogradGradInMidWindow) {
  Rig rig;
  rig.micro(0, 0);
  const Rows other = make_rows(9, rig.rank, 0);
  const auto others =
      torch::autograd::grad({rig.loss(other)}, {rig.net->first->weight, rig.net->tied});
  EXPECT_GT(others[1].abs().sum().item<double>(), 0);
  const Rows batch = make_rows(0, rig.rank, 1);
  rig.open(batch);
  const Tensor loss = rig.loss(batch);
  torch::autograd::grad({loss}, {rig.net->last->weight}, {}, true);
  rig.window.backward(loss, std::nullopt, {});
  rig.window.close();
  rig.expect(joined_gradient(rig.joined(0)));
}

// Both backwards are reduced together (the first with last = false), or only the second is reduced.
// Each batch's weight counts once.
TEST(GradientWindow, AddsUpTwoBackwardsOfABatch) {
  for (const bool together : {true, false}) {
    Rig rig;
    for (int64_t m = 0; m < 2; ++m) {
      const Rows batch = make_rows(0, rig.rank, m);
      rig.open(batch);
      const Tensor logits = rig.net->forward(batch.x);
      BackwardOptions options{.retain_graph = true, .last = !together};
      rig.window.backward(loss_mean(logits, batch.y), std::nullopt, options);
      EXPECT_EQ(rig.window.is_complete(), m == 1 && !together);
      rig.window.backward(logits.square().mean(), std::nullopt, {});
      EXPECT_THROW(rig.window.backward(logits.sum(), batch.count() + 1.0, {}), InputError);
      rig.window.close();
    }
    rig.expect(joined_gradient(rig.joined(0), true));
    double rows = 0;
    for (const Rows& batch : rig.joined(0)) {
      rows += static_cast<double>(batch.count());
    }
    EXPECT_EQ(rig.window.report().weight, rows);
    rig.net->zero_grad(false);
    rig.micro(1, 0);
    rig.micro(1, 1);
    rig.expect(joined_gradient(rig.joined(1)));
  }
}

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};
// Throws in backward, so the operators before it get no gradient.
struct Thrower : torch::autograd::Function<Thrower> {
  static Tensor forward(torch::autograd::AutogradContext*, Tensor x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw Boom();
  }
};

// An error in a backward that does not reduce affects no peer. The state is then as before it.
TEST(GradientWindow, StartsAfreshAfterAThrowInBackward) {
  Rig rig;
  rig.micro(0, 0);
  rig.micro(0, 1);
  rig.net->zero_grad(false);
  const Rows batch = make_rows(1, rig.rank, 0);
  rig.open(batch);
  const Tensor hidden = torch::tanh(rig.net->first->forward(batch.x));
  const Tensor out = rig.net->last->forward(hidden.narrow(1, 0, 4));
  const Tensor bad = Thrower::apply(hidden).sum() + out.sum();
  EXPECT_THROW(rig.window.backward(bad, std::nullopt, {}), Boom);
  EXPECT_EQ(rig.window.failure(), "boom");
  EXPECT_THROW(rig.window.backward(out.sum(), std::nullopt, {}), InputError);
  rig.window.close();
  EXPECT_FALSE(rig.window.is_complete());
  rig.micro(2, 0);
  rig.micro(2, 1);
  rig.expect(joined_gradient(rig.joined(2)));
}

TEST(GradientWindow, WeighsAShortWindowByWhatItHolds) {
  Rig rig;
  rig.micro(0, 0, true); // one batch of two, then the data ends
  rig.expect(joined_gradient(rig.joined(0, 1)));
  rig.net->zero_grad(false);
  // Short only on rank 0: the others have two batches.
  std::vector<Rows> rows;
  for (int r = 0; r < rig.world; ++r) {
    for (int64_t m = 0; m < (r == 0 ? 1 : 2); ++m) {
      rows.push_back(make_rows(1, r, m));
    }
  }
  rig.micro(1, 0, rig.rank == 0);
  if (rig.rank != 0) {
    rig.micro(1, 1);
  }
  rig.expect(joined_gradient(rows));
}

// A rank's only batch of the window had no backward, and its data ends.
TEST(GradientWindow, ARankWhoseBatchHadNoBackwardTakesPartWithoutWeight) {
  Rig rig;
  const int busy = std::max(1, rig.world - 1);
  for (int64_t number = 0; number < 3; ++number) {
    if (rig.rank < busy) {
      rig.micro(number, 0);
      rig.micro(number, 1);
    } else {
      rig.window.open({.data_ends = true});
      EXPECT_TRUE(rig.window.lacks_last_backward());
      rig.window.close();
      rig.window.complete_without_backward();
    }
    rig.expect(joined_gradient(rig.joined(number, 2, busy)));
    EXPECT_EQ(rig.window.report().number, number + 1u);
    torch::optim::SGD(rig.net->parameters(), 0.1).zero_grad();
  }
}

TEST(GradientWindow, WithoutABackwardOnAnyRankItIsDropped) {
  Rig rig;
  rig.window.open({.data_ends = true});
  rig.window.close();
  rig.window.complete_without_backward();
  EXPECT_FALSE(rig.window.is_complete());
  EXPECT_EQ(rig.window.report().number, 0u);
  rig.micro(0, 0);
  rig.micro(0, 1);
  rig.expect(joined_gradient(rig.joined(0)));
}

TEST(GradientWindow, ASumOverTokensWeighsByTheTokens) {
  Rig rig;
  for (int64_t m = 0; m < 2; ++m) {
    const Rows batch = make_rows(0, rig.rank, m);
    rig.window.open({});
    const Tensor loss = loss_sum(rig.net->forward(batch.x), batch.y);
    EXPECT_THROW(rig.window.backward(loss, std::nullopt, {}), InputError);
    rig.window.backward(loss, static_cast<double>(batch.count()), {});
    rig.window.close();
  }
  const auto batches = rig.joined(0);
  rig.expect(joined_gradient(batches));
  double sum = 0, rows = 0;
  TiedNet net = net_of_seed(1);
  for (const Rows& batch : batches) {
    sum += loss_sum(net->forward(batch.x), batch.y).item<double>();
    rows += static_cast<double>(batch.count());
  }
  EXPECT_NEAR(rig.window.report().loss, sum / rows, 1e-12);
  EXPECT_EQ(rig.window.report().non_finite, 0);
}

TEST(GradientWindow, KeepsAGradientThatWasReplacedInMidWindow) {
  Rig rig;
  rig.micro(0, 0);
  Tensor& grad = rig.net->first->weight.mutable_grad();
  grad = grad.clone();
  rig.micro(0, 1);
  rig.expect(joined_gradient(rig.joined(0)));
}

TEST(GradientWindow, RefusesAnUnweighedBackwardAndNamesTheParameter) {
  Rig rig;
  rig.micro(0, 0);
  try {
    rig.loss(make_rows(0, rig.rank, 1)).backward();
    FAIL() << "must throw";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("reached parameter \"last."), std::string::npos)
        << error.what();
  }
  // The error left a part of the gradient, so this window is dropped.
  EXPECT_THROW(rig.micro(1, 0), InputError);
  rig.micro(1, 0);
  rig.micro(1, 1);
  rig.expect(joined_gradient(rig.joined(1)));
}

TEST(GradientWindow, CountsLossesThatAreNotFinite) {
  Rig rig;
  for (int64_t m = 0; m < 2; ++m) {
    const Rows batch = make_rows(0, rig.rank, m);
    rig.open(batch);
    const bool bad = rig.rank == rig.world - 1 && m == 0;
    const Tensor loss = rig.loss(batch) * (bad ? NAN : 1.0);
    rig.window.backward(loss, std::nullopt, {});
    rig.window.close();
  }
  EXPECT_EQ(rig.window.report().non_finite, 1);
}

} // namespace hasten::window_test
