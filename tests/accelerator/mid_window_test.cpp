// A loop that changes gradients itself in the middle of a window gets an error with the parameter's
// name. After the window's end and outside accumulate(), torch's rules apply.

#include "accelerator/plain_steps.h"
#include "hasten/optim/adamw.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

using Act = std::function<void(Net&)>;

template <typename Optimizer, typename Options>
Act step_of(Options options) {
  return [options](Net& net) { Optimizer(net->parameters(), options).step(); };
}

// Like torch.optim in Python with fused=True: the step changes no version counter.
void fused_adamw(Net& net) {
  std::vector<Tensor> parameters, gradients, averages, squares, steps;
  for (const Tensor& parameter : net->parameters()) {
    if (parameter.grad().defined()) {
      parameters.push_back(parameter.detach());
      gradients.push_back(parameter.grad());
      averages.push_back(torch::zeros_like(parameter));
      squares.push_back(torch::zeros_like(parameter));
      steps.push_back(on_device::ones({}));
    }
  }
  at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, 0.1, 0.9, 0.999, 0.01,
                    1e-8, false, false);
}

// The error names the first gradient or the first parameter.
struct Culprit {
  std::string name{};
  Act act{};
  std::string says{};
};

std::vector<Culprit> culprits() {
  const std::string stepped = "] parameter \"";
  const std::string written = "] the gradient of parameter \"";
  return {{"SGD", step_of<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), stepped},
          {"Adam", step_of<torch::optim::Adam>(torch::optim::AdamOptions(0.1)), stepped},
          {"AdamW", step_of<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1)), stepped},
          {"hasten's AdamW", step_of<AdamW>(torch::optim::AdamWOptions(0.1)), stepped},
          {"_fused_adamw_", fused_adamw, stepped},
          {"clip_grad_norm_",
           [](Net& net) { torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3); }, written},
          {"clip_grad_value_",
           [](Net& net) { torch::nn::utils::clip_grad_value_(net->parameters(), 1e-4); }, written},
          {"model->zero_grad()", [](Net& net) { net->zero_grad(); }, written},
          {"model->zero_grad(false)", [](Net& net) { net->zero_grad(false); }, written},
          {"optimizer->zero_grad()",
           [](Net& net) { torch::optim::SGD(net->parameters(), 1).zero_grad(); }, written},
          {"optimizer->zero_grad(false)",
           [](Net& net) { torch::optim::SGD(net->parameters(), 1).zero_grad(false); }, written}};
}

// Calls `act` after the first of two batches: before the second, or between its forward and its
// backward.
std::string said_of(const Act& act, bool inside_batch, AcceleratorOptions options = {}) {
  options.gradient_accumulation_steps = 2;
  auto accelerator = accelerator_of(options);
  Net net = net_of_rank(accelerator);
  auto model = accelerator.prepare(net);
  const auto batches = even_batches(2);
  const std::string said = message_of([&] {
    {
      auto window = accelerator.accumulate(model);
      accelerator.backward(sum_loss(net, batches[0]), 4);
      if (!inside_batch) {
        act(net);
      }
    }
    auto window = accelerator.accumulate(model);
    const Tensor loss = sum_loss(net, batches[1]);
    if (inside_batch) {
      act(net);
    }
    accelerator.backward(loss, 4);
  });
  // An exception that leaves a guard informs the other ranks.
  message_of<std::exception>([&] { accelerator.end_training(); });
  return said;
}

TEST(MidWindow, AStepAClipOrAZeroedGradientIsAnErrorThatNamesTheParameter) {
  for (const Culprit& culprit : culprits()) {
    SCOPED_TRACE(culprit.name);
    const std::string said = said_of(culprit.act, false);
    expect_says(said, culprit.says);
    expect_says(said, "in the middle of a window");
    expect_says(said, "check_accumulation");
  }
}

// zero_grad() at the top of a loop's body is called after accumulate().
TEST(MidWindow, AGradientZeroedBehindAccumulateIsFoundByTheBackward) {
  for (const Culprit& culprit : culprits()) {
    if (culprit.says.find("gradient") != std::string::npos) {
      SCOPED_TRACE(culprit.name);
      expect_says(said_of(culprit.act, true), culprit.says);
    }
  }
}

TEST(MidWindow, TheOptionTurnsItOff) {
  for (const Culprit& culprit : culprits()) {
    SCOPED_TRACE(culprit.name);
    EXPECT_EQ(said_of(culprit.act, false, {.check_accumulation = false}), "nothing was thrown");
  }
}

// Each batch is a window. What torch allows is allowed inside its guard and between backward calls
// under no_sync().
TEST(MidWindow, BehindAWindowAndOutsideOfOneTorchIsFree) {
  for (const Culprit& culprit : culprits()) {
    SCOPED_TRACE(culprit.name);
    auto accelerator = accelerator_of();
    Net net = net_of_rank(accelerator);
    auto model = accelerator.prepare(net);
    const auto batches = even_batches(4);
    const std::string said = message_of<std::exception>([&] {
      for (int b = 0; b < 2; ++b) {
        auto window = accelerator.accumulate(model);
        accelerator.backward(sum_loss(net, batches[static_cast<size_t>(b)]), 4);
        culprit.act(net);
      }
      {
        auto quiet = accelerator.no_sync(model);
        accelerator.backward(mean_loss(net, batches[2]));
        culprit.act(net);
      }
      accelerator.backward(mean_loss(net, batches[3]));
      culprit.act(net);
    });
    EXPECT_EQ(said, "nothing was thrown");
    accelerator.end_training();
  }
}

// An Embedding with max_norm writes its weight in forward.
TEST(MidWindow, AForwardMayWriteParameters) {
  auto accelerator = accelerator_of({.gradient_accumulation_steps = 2});
  torch::manual_seed(3);
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 3).max_norm(0.1));
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  const std::string said = message_of([&, &model = model] {
    for (int64_t b = 0; b < 4; ++b) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(net->forward(on_device::tensor({b})).square().sum(), 1);
      accelerator.clip_grad_norm_(model, 0.1);
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  EXPECT_EQ(said, "nothing was thrown");
  accelerator.end_training();
}

} // namespace hasten::accelerator_test
