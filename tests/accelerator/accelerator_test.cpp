// Runs of an Accelerator against plain torch loops: worlds 1, 2, 3, 4.
#include "hasten/accelerator/accelerator.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "accelerator/accelerator_rig.h"
#include "hasten/base/error.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/world.h"

namespace hasten::accelerator_test {

using testing_support::fresh_communicator;

Accelerator make_accelerator(int64_t steps = 1) {
  AcceleratorOptions options{.gradient_accumulation_steps = steps};
  options.seed.reset(); // the harness seeds each rank differently
  options.bucket_cap_mb = 2e-4;
  return Accelerator(options, fresh_communicator());
}

Net different_net(const Accelerator& accelerator) {
  return net_of_seed(static_cast<uint64_t>(accelerator.process_index()) + 1);
}

template <typename Optimizer, typename Options>
void expect_plain_run(int64_t batch_count, int64_t k, int epochs, const Options& options,
                      bool zero_by_torch = false) {
  SCOPED_TRACE(testing::Message() << batch_count << " batches, accumulation " << k);
  auto accelerator = make_accelerator(k);
  const int world = accelerator.num_processes();
  auto batches = make_batches(batch_count);
  const PlainRun plain = plain_run<Optimizer>(batches, options, world, k, epochs);

  Net net = different_net(accelerator);
  Optimizer sgd(net->parameters(), options);
  Decay decay(sgd);
  auto [scheduler, model, loader, optimizer] = accelerator.prepare(decay, net, batches, sgd);
  size_t window = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (const auto& batch : loader) {
      auto guard = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      const double norm = accelerator.clip_grad_norm_(model, 0.2);
      EXPECT_EQ(norm > 0, accelerator.sync_gradients());
      EXPECT_EQ(optimizer.step(), accelerator.sync_gradients());
      EXPECT_FALSE(optimizer.step()) << "one step a window";
      EXPECT_EQ(scheduler.step(), accelerator.sync_gradients());
      if (accelerator.sync_gradients()) {
        ASSERT_LT(window, plain.losses.size());
        EXPECT_NEAR(norm, plain.norms[window], 1e-10);
        EXPECT_NEAR(accelerator.last_window().loss, plain.losses[window], 1e-10);
        ++window;
      }
      if (!zero_by_torch) {
        optimizer.zero_grad();
      } else if (accelerator.sync_gradients()) {
        sgd.zero_grad();
      }
    }
    window = plain.losses.size() / static_cast<size_t>(epochs) * static_cast<size_t>(epoch + 1);
  }
  EXPECT_LE(largest_difference(*net, *plain.net), 1e-10);
  EXPECT_EQ(decay.ticks, static_cast<int>(plain.losses.size()));
  EXPECT_EQ(optimizer->param_groups().size(), 1u);
  accelerator.end_training();
}

// Ten steps and more; the batch counts leave uneven lengths, short last windows
// and, on some worlds, ranks without any batch in the last or in every window.
TEST(Accelerator, NRanksAndKBatchesEqualOneOfAllRows) {
  const auto sgd = torch::optim::SGDOptions(0.3).momentum(0.9);
  const auto adamw = torch::optim::AdamWOptions(0.02);
  expect_plain_run<torch::optim::SGD>(12, 1, 2, sgd);
  expect_plain_run<torch::optim::SGD>(7, 2, 5, sgd);
  expect_plain_run<torch::optim::SGD>(13, 3, 5, sgd);
  expect_plain_run<torch::optim::SGD>(1, 1, 10, sgd);
  expect_plain_run<torch::optim::SGD>(7, 1, 3, sgd, /*zero_by_torch=*/true);
  expect_plain_run<torch::optim::AdamW>(7, 2, 4, adamw);
  expect_plain_run<torch::optim::AdamW>(2, 1, 6, adamw);
}

TEST(Accelerator, ARankAloneWithWholeBatchesIsBitwiseTorch) {
  if (testing_support::test_world().world_size > 1) {
    return;
  }
  auto accelerator = make_accelerator();
  auto batches = make_batches(8);
  Net net = net_of_seed(1), plain = net_of_seed(1);
  torch::optim::SGD sgd(net->parameters(), 0.3), other(plain->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, batch));
    optimizer.step();
    optimizer.zero_grad();
    other.zero_grad();
    mean_loss(plain, batch).backward();
    other.step();
  }
  EXPECT_EQ(largest_difference(*net, *plain), 0);
}

TEST(Accelerator, HandlesDoNothingInsideAWindow) {
  auto accelerator = make_accelerator(2);
  auto batches = make_batches(4 * accelerator.num_processes());
  Net net = different_net(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  Decay decay(sgd);
  auto [model, optimizer, loader, scheduler] = accelerator.prepare(net, sgd, batches, decay);
  auto it = loader.begin();
  {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, *it));
    const Tensor gradient = net->first->weight.grad().clone();
    const Tensor before = net->first->weight.detach().clone();
    EXPECT_EQ(accelerator.clip_grad_norm_(model, 1e-3), 0);
    EXPECT_FALSE(optimizer.step());
    EXPECT_FALSE(scheduler.step());
    optimizer.zero_grad();
    EXPECT_TRUE(torch::equal(net->first->weight.grad(), gradient));
    EXPECT_TRUE(torch::equal(net->first->weight, before));
    EXPECT_THROW(auto nested = accelerator.accumulate(model), InputError);
  }
  ++it;
  {
    auto skipped = accelerator.accumulate(model); // no backward: does not count
  }
  {
    auto window = accelerator.accumulate(model);
    EXPECT_TRUE(accelerator.sync_gradients());
    accelerator.backward(mean_loss(model, *it));
    EXPECT_TRUE(optimizer.step());
    EXPECT_TRUE(scheduler.step());
    optimizer.zero_grad();
    EXPECT_FALSE(net->first->weight.grad().defined());
  }
  EXPECT_TRUE(accelerator.sync_gradients()) << "the last window is complete";
}

// As for a GAN, one loop trains two models with two optimizers in turn. A second accelerator with
// another accumulation runs in the same loop.
TEST(Accelerator, ModelsAndAcceleratorsDoNotDisturbEachOther) {
  auto first = make_accelerator(2);
  auto second = make_accelerator(1);
  const int world = first.num_processes();
  auto batches = make_batches(6 * world);
  Net a = different_net(first), b = different_net(first), c = different_net(first);
  torch::optim::SGD sgd_a(a->parameters(), 0.3), sgd_b(b->parameters(), 0.1),
      sgd_c(c->parameters(), 0.3);
  auto [model_a, optimizer_a, loader] = first.prepare(a, sgd_a, batches);
  auto [model_b, optimizer_b] = first.prepare(b, sgd_b);
  auto [model_c, optimizer_c, loader_c] = second.prepare(c, sgd_c, batches);
  auto it = loader_c.begin();
  for (const auto& batch : loader) {
    {
      auto window = first.accumulate(loader, model_a);
      first.backward(mean_loss(model_a, batch));
      optimizer_a.step();
      EXPECT_FALSE(optimizer_b.step());
      optimizer_a.zero_grad();
    }
    {
      auto window = first.accumulate(loader, model_b);
      first.backward(mean_loss(model_b, batch));
      optimizer_b.step();
      optimizer_b.zero_grad();
    }
    auto window = second.accumulate(model_c);
    second.backward(mean_loss(model_c, *it));
    EXPECT_TRUE(optimizer_c.step());
    optimizer_c.zero_grad();
    ++it;
  }
  const auto expect = [&](Net& net, int64_t k, double rate) {
    Net plain = net_of_seed(1);
    torch::optim::SGD sgd(plain->parameters(), rate);
    for (int64_t w = 0; w * k < 6; ++w) {
      Tensor sum = on_device::zeros({}, torch::kDouble);
      double rows = 0;
      for (const Pair& batch : joined_window(batches, world, k, w)) {
        const auto n = static_cast<double>(batch.second.numel());
        sum = sum + mean_loss(plain, batch) * n;
        rows += n;
      }
      sgd.zero_grad();
      (sum / rows).backward();
      sgd.step();
    }
    EXPECT_LE(largest_difference(*net, *plain), 1e-10);
  };
  expect(a, 2, 0.3);
  expect(b, 2, 0.1);
  expect(c, 1, 0.3);
}

TEST(Accelerator, PeersLearnOfAnExceptionInsideAWindow) {
  auto accelerator = make_accelerator();
  auto batches = make_batches(4 * accelerator.num_processes());
  Net net = different_net(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  const bool fails = accelerator.process_index() + 1 == accelerator.num_processes();
  int turn = 0;
  try {
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      if (++turn == 2 && fails) {
        throw std::runtime_error("no more");
      }
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    FAIL() << "must throw on every rank";
  } catch (const CommunicationError& error) {
    EXPECT_FALSE(fails);
    EXPECT_NE(std::string(error.what()).find("an exception left the window"), std::string::npos)
        << error.what();
  } catch (const std::runtime_error& error) {
    EXPECT_TRUE(fails) << error.what();
  }
  EXPECT_EQ(turn, 2);
}

TEST(Accelerator, ABackwardThatThrowsSendsPeersWhatItWas) {
  auto accelerator = make_accelerator();
  auto batches = make_batches(2 * accelerator.num_processes());
  Net net = different_net(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.3);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  const bool fails = accelerator.process_index() == 0;
  auto it = loader.begin();
  try {
    auto window = accelerator.accumulate(model);
    const Tensor hidden = net->first->forward(it->first);
    if (fails) {
      hidden.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("overheated"); });
    }
    accelerator.backward(hidden.sum() + mean_loss(model, *it));
    FAIL() << "must throw on every rank";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("overheated"), std::string::npos) << error.what();
  }
  if (accelerator.num_processes() == 1) { // no rank waits, so training continues
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, *it));
    EXPECT_TRUE(optimizer.step());
  }
}

} // namespace hasten::accelerator_test
