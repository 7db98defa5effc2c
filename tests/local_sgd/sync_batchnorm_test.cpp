// Models with synchronised batch norm through the Accelerator. Runs on 1 to 4 ranks equal that of
// one process on the joined batches, also with uneven and stand-in batches.
#include <chrono>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "accelerator/plain_steps.h"
#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/activation_checkpoint/op_policy.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/parallel/sync_batch_norm.h"
#include "support/on_device.h"
#include "support/watched_communicator.h"

namespace hasten::accelerator_test {

// A row has two values for each channel, because torch rejects a single value for each channel.
struct NormedNetImpl : torch::nn::Module {
  NormedNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    second = register_module("second", torch::nn::Linear(8, 3));
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = norm->forward(first->forward(x).view({-1, 4, 2}));
    return second->forward(torch::tanh(h.flatten(1)));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(NormedNet);

NormedNet normed_net(uint64_t seed) {
  torch::manual_seed(seed);
  return NormedNet();
}

Tensor normed_loss(NormedNet& net, const Pair& batch) {
  return torch::nn::functional::cross_entropy(
      net->forward(batch.first), batch.second,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

// A step has `k` turns. The statistics are those of one turn's rows on all ranks. The gradient is
// the mean over all rows of the step.
NormedNet plain_normed(const std::vector<Pair>& batches, int world, int64_t k, int epochs) {
  NormedNet net = normed_net(1);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  const int64_t count = static_cast<int64_t>(batches.size());
  const int64_t turns = (count + world - 1) / world;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (int64_t begin = 0; begin < turns; begin += k) {
      sgd.zero_grad();
      double rows = 0;
      for (int64_t t = begin; t < std::min(begin + k, turns); ++t) {
        const Pair turn = joined(global_batch_of(batches, world, t));
        normed_loss(net, turn).backward();
        rows += static_cast<double>(turn.second.numel());
      }
      for (const Tensor& parameter : net->parameters()) {
        parameter.grad().div_(rows);
      }
      sgd.step();
    }
  }
  return net;
}

double largest_buffer_difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  double largest = 0;
  const auto of_a = a.buffers(), of_b = b.buffers();
  for (size_t i = 0; i < of_a.size(); ++i) {
    largest = std::max(largest, (of_a[i] - of_b[i]).to(torch::kDouble).abs().max().item<double>());
  }
  return largest;
}

enum class NormedLoop { windows, outside };

// Five turns, and one turn in which only rank 0 has a batch. Two epochs.
void expect_one_process(NormedLoop loop, int64_t k) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = k, .sync_batchnorm = true});
  const int world = accelerator.num_processes();
  auto batches = make_batches(5 * world + 1);
  NormedNet net = normed_net(static_cast<uint64_t>(accelerator.process_index()) + 1);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& batch : loader) {
      const auto rows = static_cast<double>(batch.second.numel());
      if (loop == NormedLoop::windows) {
        auto window = accelerator.accumulate(model);
        accelerator.backward(normed_loss(model, batch), rows);
        optimizer.step();
        optimizer.zero_grad();
      } else {
        accelerator.backward(normed_loss(model, batch), rows);
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  }
  accelerator.end_training();
  NormedNet plain = plain_normed(batches, world, k, 2);
  EXPECT_LE(largest_difference(*net, *plain), 1e-10);
  EXPECT_LE(largest_buffer_difference(*net, *plain), 1e-10);
}

TEST(SyncBatchNormRuns, AreThoseOfOneProcess) { expect_one_process(NormedLoop::windows, 1); }

TEST(SyncBatchNormRuns, AreThoseOfOneProcessWithoutWindowsToo) {
  expect_one_process(NormedLoop::outside, 1);
}

// Each forward uses the statistics of its turn.
TEST(SyncBatchNormRuns, JoinRanksAndNotTheBatchesOfAWindow) {
  expect_one_process(NormedLoop::windows, 4);
}

TEST(SyncBatchNormRuns, AreThoseOfOneProcessWhereARankNeverHasARow) {
  for (const auto loop : {NormedLoop::windows, NormedLoop::outside}) {
    auto accelerator = accelerator_of({.sync_batchnorm = true});
    auto batches = make_batches(1); // rank 0's
    NormedNet net = normed_net(static_cast<uint64_t>(accelerator.process_index()) + 1);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
    for (const auto& batch : loader) {
      if (loop == NormedLoop::windows) {
        auto window = accelerator.accumulate(net);
        accelerator.backward(normed_loss(net, batch), 1);
        optimizer.step();
      } else {
        accelerator.backward(normed_loss(net, batch), 1);
        optimizer.step();
      }
    }
    accelerator.end_training();
    NormedNet plain = plain_normed(batches, 1, 1, 1);
    EXPECT_LE(largest_difference(*net, *plain), 1e-10);
    EXPECT_LE(largest_buffer_difference(*net, *plain), 1e-10);
  }
}

TEST(SyncBatchNormRuns, EndWithAnErrorWhereARanksDataEnds) {
  auto accelerator = accelerator_of({.sync_batchnorm = true});
  if (accelerator.num_processes() == 1) {
    return;
  }
  auto batches = make_batches(1);
  NormedNet net = normed_net(1);
  accelerator.prepare(net);
  expect_says(message_of<Error>([&] {
                if (accelerator.is_main_process()) {
                  auto window = accelerator.accumulate(net);
                  accelerator.backward(normed_loss(net, batches[0]), 1);
                }
                accelerator.join_uneven_inputs();
              }),
              "some ranks have ended their loop and others continue to train");
}

// The other ranks wait in a layer's forward.
TEST(SyncBatchNormRuns, ARankThatFailsInItsForwardEndsTheOthers) {
  auto accelerator = accelerator_of({.sync_batchnorm = true});
  const int world = accelerator.num_processes();
  if (world == 1) {
    return;
  }
  auto batches = make_batches(world);
  NormedNet net = normed_net(1);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  const auto start = std::chrono::steady_clock::now();
  const std::string said = message_of<std::exception>([&, &model = model, &loader = loader] {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      if (accelerator.process_index() == world - 1) {
        throw std::runtime_error("planted failure");
      }
      accelerator.backward(normed_loss(model, batch), 1);
    }
  });
  if (accelerator.process_index() == world - 1) {
    EXPECT_EQ(said, "planted failure");
  } else {
    expect_says(said, "an exception left the window");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
}

TEST(SyncBatchNormRuns, AreNotForLocalSGD) {
  auto accelerator = accelerator_of({.sync_batchnorm = true});
  if (accelerator.num_processes() == 1) {
    return;
  }
  NormedNet net = normed_net(1);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  expect_says(message_of([&, &model = model] { const LocalSGD scope(accelerator, model, {}); }),
              "synchronised batch norm");
  accelerator.end_training();
}

TEST(SyncBatchNormRuns, RefuseOtherModelsOnOtherRanksEverywhere) {
  auto accelerator = accelerator_of({.sync_batchnorm = true});
  const int world = accelerator.num_processes();
  if (world == 1) {
    return;
  }
  const bool last = accelerator.process_index() + 1 == world;
  torch::nn::Sequential net(torch::nn::Linear(4, 4),
                            torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).eps(
                                last ? 1e-3 : 1e-5))); // Ddp would not detect it
  expect_says(message_of([&] { accelerator.prepare(net); }), "eps=0.001");
  accelerator.end_training();
}

// Other buffers are still synchronised. Running statistics need no synchronisation of buffers.
TEST(SyncBatchNormRuns, LeaveOtherBuffersToTheirPolicy) {
  struct NotedNormImpl : NormedNetImpl {
    NotedNormImpl() { note = register_buffer("note", on_device::zeros({1}, torch::kDouble)); }
    Tensor note;
  };
  auto accelerator = accelerator_of({.sync_batchnorm = true});
  const int rank = accelerator.process_index();
  auto net = std::make_shared<NotedNormImpl>();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto batches = make_batches(accelerator.num_processes());
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (const auto& batch : loader) {
    torch::nn::init::constant_(net->note, rank + 1);
    auto window = accelerator.accumulate(model);
    EXPECT_EQ(net->note.item<double>(), 1);
    accelerator.backward(net->forward(batch.first).sum());
  }
  accelerator.end_training();
}

struct CheckpointedNorm {
  std::vector<Tensor> gradients{}, buffers{};
  int forwards = 0, backwards = 0;
};

CheckpointedNorm run_normed(const std::shared_ptr<Communicator>& communicator,
                            const std::function<Tensor(NormedNet&, const Tensor&)>& forward) {
  auto watched = std::make_shared<testing_support::WatchedCommunicator>(communicator);
  NormedNet net = normed_net(1);
  const auto conversion = convert_sync_batchnorm(net, watched);
  CheckpointedNorm run;
  watched->before = [&run](std::string_view name) {
    const bool gradient = name.find("gradient") != std::string_view::npos;
    ++(gradient ? run.backwards : run.forwards);
  };
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(7 + watched->rank());
  const Tensor x = on_device::randn({3, 5}, generator, torch::kDouble);
  forward(net, x).square().sum().backward();
  for (const Tensor& parameter : net->parameters()) {
    run.gradients.push_back(parameter.grad());
  }
  run.buffers = net->buffers();
  return run;
}

TEST(SyncBatchNormRuns, ARecomputedForwardSendsNothingAndCountsNoBatch) {
  const auto communicator = testing_support::fresh_communicator();
  const int sent = communicator->world_size() > 1 ? 1 : 0;
  const auto plain =
      run_normed(communicator, [](NormedNet& net, const Tensor& x) { return net->forward(x); });
  for (const auto& policy : {std::shared_ptr<const OpPolicy>(), OpPolicy::keep_expensive(),
                             OpPolicy::keep({"aten::mul", "aten::sum", "aten::add"})}) {
    const auto run = run_normed(communicator, [&](NormedNet& net, const Tensor& x) {
      return activation_checkpoint([&](const Tensor& in) { return net->forward(in * 1); }, x,
                                   ActivationCheckpointOptions{.policy = policy});
    });
    EXPECT_EQ(run.forwards, sent);
    EXPECT_EQ(run.backwards, sent);
    for (size_t i = 0; i < plain.gradients.size(); ++i) {
      EXPECT_TRUE(torch::equal(plain.gradients[i], run.gradients[i])) << i;
    }
    for (size_t i = 0; i < plain.buffers.size(); ++i) {
      EXPECT_TRUE(torch::equal(plain.buffers[i], run.buffers[i])) << i;
    }
  }
}

} // namespace hasten::accelerator_test
