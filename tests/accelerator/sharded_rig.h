// Shared by the tests of sharded models: a stack of blocks whose shapes are not divisible, trained
// under any strategy.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/base/error.h"
#include "hasten/core/block_call.h"
#include "hasten/core/deferred_init.h"
#include "hasten/optim/adamw.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/world.h"

namespace hasten::sharded_test {

using at::Tensor;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(6, 11));
    norm = register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{11}));
    down = register_module("down", torch::nn::Linear(11, 6));
    gain = register_parameter("gain", on_device::ones({}));
  }
  Tensor forward(const Tensor& x) {
    return x + gain * torch::dropout(down->forward(torch::gelu(norm->forward(up->forward(x)))),
                                     dropout, is_training());
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  Tensor gain{};
  double dropout = 0;
};
TORCH_MODULE(Block);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth = 3, double dropout = 0) {
    words = register_module("words", torch::nn::Embedding(13, 6));
    for (int64_t i = 0; i < depth; ++i) {
      Block block;
      block->dropout = dropout;
      layers->push_back(block);
    }
    register_module("layers", layers);
    head = register_module("head", torch::nn::Linear(6, 3));
    head->bias.set_requires_grad(false); // frozen
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = words->forward(ids).mean(1);
    for (const auto& layer : *layers) {
      x = call_block(*layer->as<BlockImpl>(), x);
    }
    return head->forward(x);
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList layers{};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Stack);

// Batches of 1 to 3 rows. Each of 1 to 4 ranks gets some; the numbers differ by rank.
inline std::vector<std::pair<Tensor, Tensor>> batches(int64_t count) {
  std::vector<std::pair<Tensor, Tensor>> all;
  for (int64_t b = 0; b < count; ++b) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(900 + b));
    const int64_t rows = 1 + b % 3;
    all.emplace_back(on_device::randint(0, 13, {rows, 4}, generator, torch::kLong),
                     on_device::randint(0, 3, {rows}, generator, torch::kLong));
  }
  return all;
}

struct Training {
  Strategy strategy = Strategy::ddp;
  Precision precision = Precision::no;
  at::ScalarType dtype = at::kDouble;
  int64_t accumulation = 1;
  std::string checkpointing{};
  double dropout = 0;
  bool adamw = false;
  bool deferred = false; // built by deferred_init
  int64_t batches = 22;
  std::function<void(AcceleratorOptions&)> change{};
};

struct Result {
  std::vector<Tensor> parameters{}; // whole; rank 0 only
  std::vector<double> losses{}; // windows'
  std::vector<double> norms{}; // before they are clipped
  double evaluation = 0;
};

inline Stack make_stack(const Training& run, int rank) {
  torch::manual_seed(40 + static_cast<uint64_t>(rank)); // rank 0's values win
  const auto make = [&] {
    Stack made(3, run.dropout);
    made->to(run.deferred ? at::Device(at::kCPU) : testing_support::run_device(), run.dtype);
    return made;
  };
  Stack stack = run.deferred ? deferred_init(make) : make();
  if (!run.checkpointing.empty()) {
    gradient_checkpointing_enable(stack, {.mode = run.checkpointing});
  }
  return stack;
}

inline std::vector<Tensor> whole_parameters(Accelerator& accelerator, Stack& stack) {
  std::vector<Tensor> result;
  accelerator.summon_full_params(
      [&] {
        for (const Tensor& parameter : stack->parameters()) {
          result.push_back(parameter.detach().clone());
        }
      },
      stack);
  return result;
}

inline Tensor loss_of(Stack& stack, const std::pair<Tensor, Tensor>& rows) {
  return torch::nn::functional::cross_entropy(stack->forward(rows.first), rows.second);
}

inline AcceleratorOptions options_of(const Training& run) {
  AcceleratorOptions options;
  options.strategy = run.strategy;
  options.mixed_precision = run.precision;
  options.gradient_accumulation_steps = run.accumulation;
  options.seed = 12;
  options.device = testing_support::run_device().str();
  if (run.change) {
    run.change(options);
  }
  return options;
}

inline std::unique_ptr<torch::optim::Optimizer> optimizer_of(const Training& run, Stack& stack) {
  if (run.adamw) {
    return std::make_unique<AdamW>(stack->parameters(), torch::optim::AdamWOptions(0.01));
  }
  return std::make_unique<torch::optim::SGD>(stack->parameters(),
                                             torch::optim::SGDOptions(0.1).momentum(0.9));
}

inline Result train(const Training& run) {
  Accelerator accelerator(options_of(run), testing_support::fresh_communicator());
  Stack stack = make_stack(run, accelerator.process_index());
  const auto own = optimizer_of(run, stack);
  auto data = batches(run.batches);
  auto [model, optimizer, loader] = accelerator.prepare(stack, *own, data);
  Result result;
  for (const auto& rows : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(loss_of(stack, rows));
    if (accelerator.sync_gradients()) {
      result.losses.push_back(accelerator.last_window().loss);
      result.norms.push_back(accelerator.clip_grad_norm_(model, 0.5));
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  {
    const torch::NoGradGuard no_grad;
    const auto forward = accelerator.forward_scope(model);
    stack->eval();
    for (const auto& rows : batches(2)) {
      result.evaluation += loss_of(stack, rows).template item<double>();
    }
  }
  result.parameters = whole_parameters(accelerator, stack);
  accelerator.end_training();
  gradient_checkpointing_disable(stack);
  return result;
}

inline void expect_close(const Result& a, const Result& b, double tolerance) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (size_t i = 0; i < a.losses.size(); ++i) {
    EXPECT_NEAR(a.losses[i], b.losses[i], tolerance) << "window " << i;
    EXPECT_NEAR(a.norms[i], b.norms[i], tolerance) << "window " << i;
  }
  EXPECT_NEAR(a.evaluation, b.evaluation, tolerance);
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    ASSERT_EQ(a.parameters[i].sizes(), b.parameters[i].sizes());
    EXPECT_LE((a.parameters[i] - b.parameters[i]).abs().max().item<double>(), tolerance)
        << "parameter " << i;
  }
}

// A model with AdamW's moments under a strategy, on ranks of one kind or another.
struct Learning {
  Learning(Strategy strategy, std::shared_ptr<Communicator> communicator)
      : run{.strategy = strategy,
            .adamw = true,
            .change =
                [](AcceleratorOptions& o) {
                  o.shard_size = testing_support::test_world().world_size % 2 == 0 ? 2 : 0;
                }},
        accelerator(options_of(run), std::move(communicator)),
        stack(make_stack(run, accelerator.process_index())),
        own(optimizer_of(run, stack)),
        optimizer(std::get<1>(accelerator.prepare(stack, *own))) {}
  // All ranks have the same rows, so the mean over ranks equals one rank's gradient.
  void step(int64_t number) {
    auto window = accelerator.accumulate(stack);
    accelerator.backward(loss_of(stack, batches(number + 1)[static_cast<size_t>(number)]), 1);
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<Tensor> whole() { return whole_parameters(accelerator, stack); }

  Training run;
  Accelerator accelerator;
  Stack stack;
  std::unique_ptr<torch::optim::Optimizer> own;
  PreparedOptimizer<torch::optim::Optimizer> optimizer;
};

} // namespace hasten::sharded_test
