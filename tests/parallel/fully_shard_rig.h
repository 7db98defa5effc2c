// Shared by the tests of FullyShard: a small model with awkward shapes, fp64, and its training by a
// plain loop on all ranks' samples.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/core/block_call.h"
#include "hasten/parallel/fully_shard.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::shard_test {

using at::Tensor;
using testing_support::fresh_communicator;

constexpr int64_t kIn = 5;
constexpr int64_t kWide = 6;

// Only dimension 0 of size 10 is much larger than the number of ranks. One parameter is 0-d, one is
// frozen in the middle of the graph.
struct AwkwardImpl : torch::nn::Module {
  AwkwardImpl() {
    up = register_module("up", torch::nn::Linear(kWide, 10));
    down = register_module("down", torch::nn::Linear(10, kWide));
    gain = register_parameter("gain", on_device::randn({}));
    mix = register_parameter("mix", on_device::randn({2, kWide}));
    fixed = register_parameter("fixed", on_device::randn({kWide, kWide}), false);
    dropout = register_module("dropout", torch::nn::Dropout(0.2));
  }
  Tensor forward(const Tensor& x) {
    ++calls;
    if (throws) {
      throw std::runtime_error("the block's own");
    }
    Tensor y = down->forward(torch::tanh(up->forward(x))) * gain;
    if (drops) {
      y = dropout->forward(y);
    }
    return torch::tanh(torch::linear(y + x * mix.sum(0), fixed));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  Tensor gain, mix, fixed;
  torch::nn::Dropout dropout{nullptr};
  int calls = 0;
  bool throws = false;
  bool drops = false;
};
TORCH_MODULE(Awkward);

// The root's weight is tied: it has two names and is used first and last.
struct NetImpl : torch::nn::Module {
  NetImpl(uint64_t seed, int depth) {
    torch::manual_seed(seed);
    weight = register_parameter("weight", on_device::randn({kWide, kIn}));
    register_parameter("head", weight);
    auto list = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < depth; ++i) {
      blocks.emplace_back();
      list->push_back(blocks.back());
    }
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor hidden(const Tensor& x, const std::vector<int>& order) {
    Tensor y = torch::linear(x, weight);
    for (const int i : order) {
      y = call_block(blocks[static_cast<size_t>(i)], y);
      if (in_backward) {
        y.register_hook([this](const Tensor&) { in_backward(); });
      }
    }
    return y;
  }
  Tensor forward(const Tensor& x) {
    std::vector<int> order;
    for (size_t i = 0; i < blocks.size(); ++i) {
      order.push_back(static_cast<int>(i));
    }
    return forward(x, order);
  }
  Tensor forward(const Tensor& x, const std::vector<int>& order) {
    return torch::linear(hidden(x, order), weight.t());
  }
  Tensor weight;
  std::vector<Awkward> blocks{};
  std::function<void()> in_backward{}; // runs when backward has a block's output gradient
};
TORCH_MODULE(Net);

inline std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const Net& net) {
  return repeated_blocks(*net);
}

// rank + 1 rows. They depend only on rank and turn.
inline Tensor rows_of(int rank, int turn, int64_t width = kIn) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(50 + rank + 100 * turn);
  return on_device::randn({rank + 1, width}, generator, torch::kDouble);
}

using Loss = std::function<Tensor(NetImpl&, const Tensor& rows)>;
inline Tensor square_loss(NetImpl& net, const Tensor& rows) {
  return net.forward(rows).square().sum();
}

// One window of `micro` batches on every rank. Afterwards the gradients are complete.
inline double shard_step(FullyShard& sharded, Net net, int rank, int turn, int micro = 1,
                         const Loss& loss_of = square_loss) {
  double sum = 0;
  sharded.begin();
  for (int m = 0; m < micro; ++m) {
    Tensor loss;
    {
      const auto scope = sharded.forward_scope();
      loss = loss_of(*net, rows_of(rank, turn * micro + m));
    }
    sharded.start_backward(m + 1 == micro);
    loss.backward();
    sharded.finish_backward();
    sum += loss.item<double>();
  }
  sharded.finish(0.01);
  return sum;
}

inline void plain_step(Net net, int world, int turn, int micro = 1,
                       const Loss& loss_of = square_loss) {
  Tensor sum = on_device::zeros({}, torch::kDouble);
  for (int rank = 0; rank < world; ++rank) {
    for (int m = 0; m < micro; ++m) {
      sum = sum + loss_of(*net, rows_of(rank, turn * micro + m));
    }
  }
  (sum * 0.01).backward();
}

// The tied weight has two names but takes one step.
inline void descend(Net net, double rate = 0.1) {
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : net->parameters()) {
    if (parameter.grad().defined()) {
      parameter.sub_(parameter.grad(), rate);
      parameter.mutable_grad().reset();
    }
  }
}

inline void expect_equal_parameters(FullyShard& sharded, const torch::nn::Module& plain,
                                    double tolerance, const std::string& where = {}) {
  const auto wanted = plain.named_parameters();
  sharded.for_each_full_parameter([&](const std::string& name, const Tensor& whole) {
    ASSERT_EQ(whole.sizes(), wanted[name].sizes()) << name;
    EXPECT_LE((whole - wanted[name]).abs().max().item<double>(), tolerance) << where << " " << name;
  });
}

inline void expect_equal_gradients(FullyShard& sharded, const torch::nn::Module& plain,
                                   double tolerance) {
  const auto wanted = plain.named_parameters();
  for (size_t i = 0; i < sharded.parameters().size(); ++i) {
    const ShardedParameter& entry = sharded.parameters()[i];
    const Tensor gradient = wanted[entry.name].grad();
    ASSERT_EQ(entry.parameter.grad().defined(), gradient.defined()) << entry.name;
    if (gradient.defined()) {
      const Tensor whole = sharded.gather_like(i, entry.parameter.grad());
      EXPECT_LE((whole - gradient).abs().max().item<double>(), tolerance) << entry.name;
    }
  }
}

using Counts = std::vector<int64_t>;

// A value for each block and, last, one for the root.
inline Counts gathers_of(const FullyShard& sharded) {
  Counts counts;
  for (const ShardUnitReport& unit : sharded.report().units) {
    counts.push_back(unit.gathers);
  }
  return counts;
}

inline std::string what_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no InputError";
}

inline bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

} // namespace hasten::shard_test
