// Mistakes that would make ranks hang or differ without a message are errors that name the mistake,
// also with one process. Worlds 1 to 4.
#include "accelerator/plain_steps.h"
#include "support/environment.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

struct Ready {
  explicit Ready(Accelerator& accelerator)
      : net(net_of_rank(accelerator)), sgd(net->parameters(), 0.1) {}
  Net net;
  torch::optim::SGD sgd;
};

TEST(Misuse, AReplacedParameterIsNamed) {
  auto accelerator = accelerator_of();
  auto batches = even_batches(2 * accelerator.num_processes());
  Ready r(accelerator);
  auto [model, optimizer, loader] = accelerator.prepare(r.net, r.sgd, batches);
  r.net->second->bias =
      r.net->second->register_parameter("bias2", on_device::zeros({3}, torch::kDouble));
  expect_says(message_of([&] { auto window = accelerator.accumulate(model); }),
              "\"second.bias2\" is another tensor than when the model was prepared");
  expect_says(message_of([&] { loader.begin(); }), "second.bias2");
}

TEST(Misuse, ABackwardOfTorchsIsRefusedAtTheStep) {
  auto accelerator = accelerator_of();
  Ready r(accelerator);
  auto [model, optimizer] = accelerator.prepare(r.net, r.sgd);
  const Pair batch = make_batches(2)[1];
  mean_loss(model, batch).backward();
  expect_says(message_of([&] { optimizer.step(); }), "come from a backward that was not");
  expect_says(message_of([&] { accelerator.clip_grad_norm_(model, 1.0); }), "pass every model");
  accelerator.backward(mean_loss(model, batch)); // adds to the same gradients
  EXPECT_THROW(optimizer.step(), InputError);
  optimizer.zero_grad();
  EXPECT_TRUE(optimizer.step());
  mean_loss(model, batch).backward();
  r.sgd.zero_grad(); // by torch
  accelerator.backward(mean_loss(model, batch));
  EXPECT_TRUE(optimizer.step());
}

// A generator's loss reaches the discriminator, whose window is open.
TEST(Misuse, ALossOfAnotherModelInAnOpenWindowIsNamed) {
  for (const bool frozen : {false, true}) {
    auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
    Net generator = net_of_rank(accelerator);
    torch::nn::Linear discriminator(3, 1);
    discriminator->to(testing_support::run_device(), torch::kDouble);
    torch::optim::SGD sgd_g(generator->parameters(), 0.1), sgd_d(discriminator->parameters(), 0.1);
    auto [g, optimizer_g] = accelerator.prepare(generator, sgd_g);
    auto [d, optimizer_d] = accelerator.prepare(discriminator, sgd_d);
    const Tensor noise = make_batches(2)[1].first;
    const auto train = [&, &g = g, &d = d, &optimizer_g = optimizer_g, &optimizer_d = optimizer_d] {
      {
        auto window = accelerator.accumulate(d);
        accelerator.backward(d->forward(g->forward(noise).detach()).sum(), 4);
        optimizer_d.step();
        optimizer_d.zero_grad();
      }
      auto window = accelerator.accumulate(g);
      for (const Tensor& parameter : d->parameters()) {
        parameter.set_requires_grad(!frozen);
      }
      const Tensor loss = d->forward(g->forward(noise)).sum();
      for (const Tensor& parameter : d->parameters()) {
        parameter.set_requires_grad(true);
      }
      accelerator.backward(loss, 4);
      const bool stepped = optimizer_g.step();
      optimizer_g.zero_grad();
      return stepped;
    };
    if (frozen) { // as the error says
      EXPECT_FALSE(train());
      EXPECT_TRUE(train());
      continue;
    }
    const std::string what = message_of<Error>(train);
    expect_says(what, "a loss of other models, reached parameter \"");
    expect_says(what, "freeze this model");
  }
}

TEST(Misuse, ParametersAddedToAnOptimizerMustBePrepared) {
  auto accelerator = accelerator_of();
  Ready r(accelerator);
  auto [model, optimizer] = accelerator.prepare(r.net, r.sgd);
  const Tensor stray = on_device::zeros({4}, torch::requires_grad());
  r.sgd.add_param_group(torch::optim::OptimizerParamGroup({stray}));
  expect_says(message_of([&] { optimizer.step(); }),
              "parameter 4 [4] belongs to no prepared model");
}

TEST(Misuse, AStepWithGradientsThatAreNotReduced) {
  auto accelerator = accelerator_of();
  Ready r(accelerator);
  auto [model, optimizer] = accelerator.prepare(r.net, r.sgd);
  const Pair batch = make_batches(2)[1];
  {
    auto quiet = accelerator.no_sync(model);
    accelerator.backward(mean_loss(model, batch));
    expect_says(message_of([&] { optimizer.step(); }),
                "1 backward calls under no_sync() are not reduced yet");
  }
  EXPECT_THROW(optimizer.step(), InputError);
  EXPECT_THROW(optimizer.zero_grad(), InputError);
  expect_says(message_of([&] { auto window = accelerator.accumulate(model); }),
              "wait under no_sync() to be reduced");
  accelerator.backward(mean_loss(model, batch));
  EXPECT_TRUE(optimizer.step());
}

TEST(Misuse, AGuardThatDoesNotLiveUntilBackward) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  auto batches = even_batches(2 * accelerator.num_processes());
  Ready r(accelerator);
  auto [model, optimizer, loader] = accelerator.prepare(r.net, r.sgd, batches);
  auto it = loader.begin();
  { auto gone = accelerator.accumulate(model); }
  expect_says(message_of([&] { accelerator.backward(mean_loss(model, *it)); }),
              "was closed before its backward");
  {
    auto window = accelerator.accumulate(model);
    accelerator.backward(mean_loss(model, *it));
  }
  expect_says( // a batch of the window without accumulate()
      message_of([&] { accelerator.backward(mean_loss(model, *it)); }), "has 1 of 2 batches");
}

// A count of a rank's own batches differs where data is uneven.
TEST(Misuse, StepsThatDependOnARanksOwnBatches) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  if (world == 1) {
    return; // there is no other rank
  }
  auto batches = even_batches(4 * world - 1); // the last rank has 3
  Ready r(accelerator);
  auto [model, optimizer, loader] = accelerator.prepare(r.net, r.sgd, batches);
  const int64_t mine = accelerator.process_index() + 1 == world ? 3 : 4;
  const auto run = [&] {
    int64_t i = 0;
    for (const auto& batch : loader) {
      accelerator.backward(mean_loss(model, batch));
      if (++i % 2 == 0 || i == mine) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    accelerator.end_training();
  };
  const std::string text = message_of<CommunicationError>(run);
  EXPECT_TRUE(text.find("stepped different optimizers") != std::string::npos ||
              text.find("same optimizer steps") != std::string::npos ||
              text.find("different optimizer steps") != std::string::npos)
      << text;
}

TEST(Misuse, AStepOfOneRankAloneIsFoundAtTheEnd) {
  auto accelerator = accelerator_of();
  if (accelerator.num_processes() == 1) {
    return;
  }
  Ready r(accelerator);
  auto [model, optimizer] = accelerator.prepare(r.net, r.sgd);
  accelerator.backward(mean_loss(model, make_batches(2)[1]));
  if (accelerator.is_main_process()) {
    optimizer.step();
  }
  expect_says(message_of<CommunicationError>([&] { accelerator.end_training(); }),
              "different optimizer steps");
}

TEST(Misuse, AStepOfOneRankAloneIsFoundInTheNextWindow) {
  auto accelerator = accelerator_of();
  if (accelerator.num_processes() == 1) {
    return;
  }
  Ready r(accelerator);
  auto [model, optimizer] = accelerator.prepare(r.net, r.sgd);
  const Pair batch = make_batches(2)[1];
  accelerator.backward(mean_loss(model, batch));
  if (accelerator.is_main_process()) {
    optimizer.step();
  }
  optimizer.zero_grad();
  expect_says(
      message_of<CommunicationError>([&] { accelerator.backward(mean_loss(model, batch)); }),
      "stepped different optimizers before it");
}

TEST(Debug, NamesTheFirstCollectiveThatDiffers) {
  auto accelerator = accelerator_of({.backend = "gloo", .debug = true});
  auto batches = even_batches(4 * accelerator.num_processes());
  Ready r(accelerator);
  auto [model, optimizer, loader] = accelerator.prepare(r.net, r.sgd, batches);
  // Two sums of one number each. Rank 0 calls them in another order. No other check would detect
  // it, over Gloo.
  const auto loop = [&] {
    int turn = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      const bool swapped = ++turn == 3 && accelerator.is_main_process();
      Tensor loss = on_device::ones({1}), correct = on_device::ones({1});
      for (const bool first : {true, false}) {
        const bool of_loss = first != swapped;
        accelerator.communicator()->all_reduce(of_loss ? loss : correct, ReduceOp::SUM,
                                               of_loss ? "loss" : "correct");
      }
      accelerator.backward(mean_loss(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(accelerator.num_processes(), 1);
  };
  if (accelerator.num_processes() == 1) {
    loop();
    return;
  }
  const std::string text = message_of<CommunicationError>(loop);
  expect_says(text, "rank 1's collective ");
  expect_says(text, "was all_reduce \"loss\" of Float [1], rank 0's all_reduce ");
}

TEST(Debug, NamesTheFirstParameterThatDiffers) {
  const testing_support::ScopedEnvironment on(
      testing_support::EnvironmentValues{{"HASTEN_DEBUG", "1"}});
  auto accelerator = accelerator_of();
  auto batches = even_batches(4 * accelerator.num_processes());
  Ready r(accelerator);
  auto [model, optimizer, loader] = accelerator.prepare(r.net, r.sgd, batches);
  const auto loop = [&] {
    int turn = 0;
    for (const auto& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(mean_loss(model, batch));
      if (++turn == 2 && !accelerator.is_main_process()) {
        r.net->second->bias.mutable_grad() =
            on_device::ones({3}, torch::kDouble); // set by the user, on some ranks
      }
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  if (accelerator.num_processes() == 1) {
    loop();
    return;
  }
  expect_says(message_of<CommunicationError>(loop),
              "rank 1's parameter \"second.bias\" of model 0 differs from rank 0's");
}

// Use create_graph in autograd::grad. The gradient penalty is weighted, too.
TEST(Misuse, AGradientPenaltyIsInTheJoinedGradient) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  const int world = accelerator.num_processes();
  auto batches = make_batches(2 * world);
  Ready r(accelerator);
  auto [model, optimizer, loader] = accelerator.prepare(r.net, r.sgd, batches);
  const auto penalised = [](Net& net, const Pair& batch) {
    const Tensor x = batch.first.clone().requires_grad_();
    const Tensor out = net->forward(x).sum();
    const Tensor slope = torch::autograd::grad({out}, {x}, {}, true, true)[0];
    return mean_loss(net, batch) + slope.square().sum(1).mean();
  };
  for (const auto& batch : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(penalised(model, batch));
  }
  expect_gradients(*r.net,
                   plain_gradients([&](Net& plain) { return penalised(plain, joined(batches)); }));
}

// The user sets a gradient after the window. Clipping and the step use it.
TEST(Misuse, AGradientSetByHandIsClippedAndStepped) {
  auto accelerator = accelerator_of();
  Ready r(accelerator);
  auto [model, optimizer] = accelerator.prepare(r.net, r.sgd);
  accelerator.backward(mean_loss(model, make_batches(2)[1]));
  for (Tensor& p : r.net->parameters()) {
    p.mutable_grad() = torch::zeros_like(p);
  }
  Tensor& bias = r.net->second->bias;
  bias.mutable_grad() = on_device::full({3}, 2.0, torch::kDouble);
  r.net->first->bias.mutable_grad().reset(); // stays undefined
  const Tensor before = bias.detach().clone();
  EXPECT_NEAR(accelerator.clip_grad_norm_(model, 1.0), std::sqrt(12.0), 1e-12);
  EXPECT_FALSE(r.net->first->bias.grad().defined());
  optimizer.step();
  const double change = 0.1 / std::sqrt(3.0);
  EXPECT_LE((before - bias - change).abs().max().item<double>(), 1e-6);
}

} // namespace hasten::accelerator_test
