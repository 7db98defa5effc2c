// Parameters that are frozen, unfrozen and replaced between windows, as users write it: gradual
// unfreezing with a second prepare(). The reference is one process with torch's loop.
#include "accelerator/plain_steps.h"
#include "accelerator/sharded_rig.h"

namespace hasten::unfreeze_test {

using accelerator_test::accelerator_of;
using accelerator_test::expect_says;
using accelerator_test::message_of;
using at::Tensor;
using sharded_test::Stack;
using Optimizer = torch::optim::AdamW;

constexpr int kSteps = 2; // of a stage

Stack make_stack(uint64_t seed) {
  torch::manual_seed(seed);
  Stack stack;
  stack->to(testing_support::run_device(), at::kDouble);
  return stack;
}

void train_only(Stack& stack, const std::vector<std::string>& prefixes) {
  for (auto& item : stack->named_parameters()) {
    item.value().set_requires_grad(
        std::ranges::any_of(prefixes, [&](const auto& p) { return item.key().starts_with(p); }));
  }
}

/// The head; then the last block, too; then the blocks with another head; then all. `again` prepares
/// again, `steps` trains.
void unfreeze_gradually(Stack& stack, Optimizer& optimizer, const std::function<void()>& again,
                        const std::function<void(int stage)>& steps) {
  steps(0);
  train_only(stack, {"head.", "layers.2."});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(stack->layers[2]->parameters()));
  again();
  steps(1);
  torch::manual_seed(77);
  torch::nn::Linear head(6, 3);
  head->to(testing_support::run_device(), at::kDouble);
  stack->head = stack->replace_module("head", head);
  optimizer.param_groups()[0].params() = head->parameters();
  train_only(stack, {"head.", "layers.2."});
  again();
  steps(2);
  train_only(stack, {"words.", "layers."});
  std::vector<Tensor> rest = stack->words->parameters();
  for (const size_t layer : {0, 1}) {
    for (const Tensor& parameter : stack->layers[layer]->parameters()) {
      rest.push_back(parameter);
    }
  }
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(rest));
  again();
  steps(3);
}

Tensor sum_loss(Stack& stack, const std::pair<Tensor, Tensor>& batch) {
  return at::cross_entropy_loss(stack->forward(batch.first), batch.second, {}, at::Reduction::Sum);
}

TEST(GradualUnfreezing, EqualsAPlainLoopUnderDdpAndFsdp) {
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp, Strategy::zero1}) {
    SCOPED_TRACE(strategy_name(strategy));
    auto accelerator = accelerator_of({.strategy = strategy});
    const int world = accelerator.num_processes();
    const auto batches = sharded_test::batches(4 * kSteps * world);

    Stack plain = make_stack(1);
    train_only(plain, {"head."});
    Optimizer adamw(plain->head->parameters(), torch::optim::AdamWOptions(0.05));
    unfreeze_gradually(
        plain, adamw, [] {},
        [&](int stage) {
          for (int step = stage * kSteps; step < (stage + 1) * kSteps; ++step) {
            Tensor sum = on_device::zeros({}, at::kDouble);
            double rows = 0;
            for (int rank = 0; rank < world; ++rank) {
              const auto& batch = batches[static_cast<size_t>(step * world + rank)];
              sum = sum + sum_loss(plain, batch);
              rows += static_cast<double>(batch.second.numel());
            }
            (sum / rows).backward();
            adamw.step();
            adamw.zero_grad();
          }
        });

    Stack stack = make_stack(1 + static_cast<uint64_t>(accelerator.process_index()));
    train_only(stack, {"head."});
    Optimizer own(stack->head->parameters(), torch::optim::AdamWOptions(0.05));
    auto [model, optimizer] = accelerator.prepare(stack, own);
    unfreeze_gradually(
        stack, own, [&, &model = model] { accelerator.prepare(model, own); },
        [&, &model = model, &optimizer = optimizer](int stage) {
          for (int step = stage * kSteps; step < (stage + 1) * kSteps; ++step) {
            const auto& batch =
                batches[static_cast<size_t>(step * world + accelerator.process_index())];
            auto window = accelerator.accumulate(model);
            accelerator.backward(sum_loss(stack, batch), static_cast<double>(batch.second.numel()));
            EXPECT_TRUE(optimizer.step());
            optimizer.zero_grad();
          }
        });
    const NamedTensors whole = accelerator.get_state_dict(model);
    for (const auto& item : plain->named_parameters()) {
      if (whole.empty()) {
        continue; // another rank has them
      }
      const Tensor wanted = item.value().detach().cpu();
      EXPECT_LE((whole.at(item.key()).cpu() - wanted).abs().max().item<double>(), 1e-9)
          << item.key();
    }
  }
}

TEST(GradualUnfreezing, AnOptimizerThatIsGoneIsNotAsked) {
  auto accelerator = accelerator_of();
  const auto batch = sharded_test::batches(1)[0];
  Stack stack = make_stack(1);
  train_only(stack, {"head."});
  for (const char* also : {"layers.2.", "words."}) {
    auto sgd = std::make_unique<torch::optim::SGD>(stack->parameters(), 0.1);
    auto decay = std::make_unique<accelerator_test::Decay>(*sgd);
    auto [model, optimizer, scheduler] = accelerator.prepare(stack, *sgd, *decay);
    auto window = accelerator.accumulate(model);
    accelerator.backward(sum_loss(stack, batch), 1);
    EXPECT_TRUE(optimizer.step());
    EXPECT_TRUE(scheduler.step());
    optimizer.zero_grad();
    train_only(stack, {"head.", also});
  }
}

TEST(GradualUnfreezing, WhatDoesNotFitIsAnErrorThatSaysSo) {
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    SCOPED_TRACE(strategy_name(strategy));
    auto accelerator = accelerator_of({.gradient_accumulation_steps = 2, .strategy = strategy});
    const auto batches = sharded_test::batches(2 * accelerator.num_processes());
    const auto& batch = batches[static_cast<size_t>(accelerator.process_index())];
    const auto rows = static_cast<double>(batch.second.numel());
    Stack stack = make_stack(1);
    train_only(stack, {"head.weight"});
    torch::optim::SGD sgd(stack->head->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(stack, sgd);
    accelerator.prepare(model, sgd); // as often as you like
    train_only(stack, {"head."});
    expect_says(message_of([&] { auto window = accelerator.accumulate(model); }),
                "call prepare() again after requires_grad_(true)");
    accelerator.prepare(model);
    const auto train = [&, &model = model] {
      auto window = accelerator.accumulate(model);
      accelerator.backward(sum_loss(stack, batch), rows);
    };
    train();
    train_only(stack, {"head.", "words."});
    expect_says(message_of([&] { accelerator.prepare(model); }),
                "Expected a second prepare() between windows");
    train_only(stack, {"head."});
    train();
    train_only(stack, {"head.", "words."});
    expect_says(message_of([&] { accelerator.prepare(model); }),
                "call optimizer.zero_grad() before");
    EXPECT_FALSE(stack->words->weight.grad().defined());
    optimizer.zero_grad();
    accelerator.prepare(model);
    if (accelerator.num_processes() > 1) {
      train_only(stack, {accelerator.process_index() == 0 ? "head." : "words."});
      expect_says(message_of([&] { accelerator.prepare(model); }), "rank 1's model has parameter");
      train_only(stack, {"head.", "words."});
    }
    torch::nn::Linear head(6, 3);
    head->to(testing_support::run_device(), at::kDouble);
    stack->head = stack->replace_module("head", head);
    accelerator.prepare(model); // the optimizer still has the old head
    expect_says(message_of([&, &optimizer = optimizer] { optimizer.zero_grad(); }),
                "belongs to no prepared model");
    sgd.param_groups()[0].params() = head->parameters();
    accelerator.prepare(model, sgd);
    train();
    train();
    EXPECT_TRUE(optimizer.step());
  }
}

} // namespace hasten::unfreeze_test
