// Ddp's options through the Accelerator: uneven inputs, unused parameters,
// communication hooks, the report.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerator/accelerator_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

using testing_support::fresh_communicator;

const auto kMomentum = torch::optim::SGDOptions(0.2).momentum(0.9);

// Batch `turn` of `rank`. In the last turn only rank 0 has one.
Pair batch_of(int rank, int turn) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(300 + 10 * rank + turn);
  return {on_device::randn({1 + (rank + turn) % 3, 5}, generator, torch::kDouble),
          on_device::randint(0, 3, {1 + (rank + turn) % 3}, generator, torch::kLong)};
}

Net joined_reference(int world) {
  Net net = net_of_seed(1);
  torch::optim::SGD optimizer(net->parameters(), kMomentum);
  for (int turn = 0; turn < world; ++turn) {
    std::vector<Tensor> x, y;
    for (int rank = 0; rank < (turn + 1 < world ? world : 1); ++rank) {
      x.push_back(batch_of(rank, turn).first);
      y.push_back(batch_of(rank, turn).second);
    }
    optimizer.zero_grad();
    mean_loss(net, {torch::cat(x), torch::cat(y)}).backward();
    optimizer.step();
  }
  return net;
}

void expect_uneven_is_joined(std::shared_ptr<CommHook> hook, double tolerance) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  Net net = net_of_seed(static_cast<uint64_t>(rank) + 1);
  Accelerator accelerator({.bucket_cap_mb = 2e-4}, communicator);
  torch::optim::SGD sgd(net->parameters(), kMomentum);
  std::vector<Pair> batches;
  for (int i = 0; i < communicator->world_size() * (communicator->world_size() - 1) + 1; ++i) {
    batches.push_back(batch_of(i % communicator->world_size(), i / communicator->world_size()));
  }
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  accelerator.register_comm_hook(model, std::move(hook));
  for (const Pair& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_LE(largest_difference(*net, *joined_reference(communicator->world_size())), tolerance);
  if (communicator->world_size() > 1) {
    EXPECT_GT(accelerator.last_window().communication_seconds, 0);
  }
  accelerator.end_training();
}

TEST(AcceleratorDdp, UnevenInputsAreTheJoinedBatch) { expect_uneven_is_joined(nullptr, 1e-12); }

// The hook sums fp64 gradients as 16-bit numbers. After five steps with momentum and rate 0.2 the
// difference is a few rounding errors of 16 bits.
TEST(AcceleratorDdp, ACommunicationHookServesUnevenInputsToo) {
  expect_uneven_is_joined(std::make_shared<Fp16CompressHook>(), 5e-3);
}

TEST(AcceleratorDdp, UnusedParametersAreNamedUnlessAllowed) {
  for (const bool allowed : {true, false}) {
    auto communicator = fresh_communicator();
    Net net = net_of_seed(1);
    Accelerator accelerator({.find_unused_parameters = allowed}, communicator);
    auto model = accelerator.prepare(net);
    std::string what;
    try {
      auto window = accelerator.accumulate(model);
      const Tensor x = batch_of(0, 0).first;
      accelerator.backward(net->first->forward(x).square().sum(), 1.0);
    } catch (const InputError& error) {
      what = error.what();
    }
    if (allowed || communicator->world_size() == 1) {
      EXPECT_EQ(what, "");
      EXPECT_FALSE(net->second->weight.grad().defined());
    } else {
      EXPECT_NE(what.find("\"second.bias\", \"second.weight\""), std::string::npos) << what;
    }
  }
}

// The last rank does not use a layer that the first backward used. A static graph sends nothing
// after that backward, so only this rank knows. The others get its error at their next collective,
// and no rank hangs.
TEST(AcceleratorDdp, AStaticGraphThatChangesOnOneRankIsNamedOnAll) {
  auto communicator = fresh_communicator();
  const int rank = communicator->rank();
  const int last = communicator->world_size() - 1;
  Net net = net_of_seed(1);
  Accelerator accelerator({.static_graph = true}, communicator);
  auto model = accelerator.prepare(net);
  std::string what;
  int done = 0;
  try {
    for (int turn = 0; turn < 6; ++turn) {
      auto window = accelerator.accumulate(model);
      const Tensor x = batch_of(rank, turn).first;
      const bool odd = rank == last && turn == 3;
      accelerator.backward((odd ? net->first->forward(x) : net->forward(x)).square().sum(), 1.0);
      net->zero_grad();
      ++done;
    }
  } catch (const Error& error) {
    what = error.what();
  }
  if (last == 0) {
    EXPECT_EQ(what, "") << "nothing is reduced";
    return;
  }
  EXPECT_NE(what.find("\" has no gradient, and had one"), std::string::npos) << what;
  EXPECT_NE(what.find("static_graph"), std::string::npos) << what;
  EXPECT_LE(done, rank == last ? 3 : 5);
  EXPECT_GE(done, 3);
}

} // namespace hasten::accelerator_test
