// Shared by the Accelerator's tests: a classifier in fp64, samples by number, and the reference for
// every rank: one plain torch loop over joined batches.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "support/on_device.h"

namespace hasten::accelerator_test {

using at::Tensor;
using Pair = std::pair<Tensor, Tensor>; // inputs [B, 5], classes [B]

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(5, 8));
    second = register_module("second", torch::nn::Linear(8, 3));
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return second->forward(torch::tanh(first->forward(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

inline Net net_of_seed(uint64_t seed) {
  torch::manual_seed(seed);
  return Net();
}

// Batches of 1 … 4 rows, the same on every rank.
inline std::vector<Pair> make_batches(int64_t count) {
  std::vector<Pair> batches;
  for (int64_t b = 0; b < count; ++b) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(77 + b);
    const int64_t n = 1 + (3 * b) % 4;
    batches.emplace_back(on_device::randn({n, 5}, generator, torch::kDouble),
                         on_device::randint(0, 3, {n}, generator, torch::kLong));
  }
  return batches;
}

inline Tensor mean_loss(Net& net, const Pair& batch) {
  return torch::nn::functional::cross_entropy(net->forward(batch.first), batch.second);
}

// A scheduler of a user: the rate after n steps is base / (1 + n).
struct Decay {
  explicit Decay(torch::optim::Optimizer& optimizer)
      : optimizer(optimizer), base(optimizer.param_groups()[0].options().get_lr()) {}
  void step() {
    ++ticks;
    optimizer.param_groups()[0].options().set_lr(base / (1 + static_cast<double>(ticks)));
  }
  torch::optim::Optimizer& optimizer;
  double base;
  int ticks = 0;
};

// The batches of window w: k per rank, distributed round-robin over `world` ranks.
inline std::vector<Pair> joined_window(const std::vector<Pair>& batches, int world, int64_t k,
                                       int64_t w) {
  std::vector<Pair> joined;
  for (int rank = 0; rank < world; ++rank) {
    for (int64_t turn = w * k; turn < (w + 1) * k; ++turn) {
      const auto b = static_cast<size_t>(turn * world + rank);
      if (b < batches.size()) {
        joined.push_back(batches[b]);
      }
    }
  }
  return joined;
}

struct PlainRun {
  Net net{nullptr};
  std::vector<double> losses{}; // mean of each window
  std::vector<double> norms{}; // before clipping
};

// Epochs of windows, clipping at 0.2, one tick a step.
template <typename Optimizer, typename Options>
PlainRun plain_run(const std::vector<Pair>& batches, const Options& options, int world, int64_t k,
                   int epochs) {
  PlainRun run;
  run.net = net_of_seed(1);
  Optimizer optimizer(run.net->parameters(), options);
  Decay decay(optimizer);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (int64_t w = 0;; ++w) {
      const auto joined = joined_window(batches, world, k, w);
      if (joined.empty()) {
        break;
      }
      std::vector<Tensor> x, y;
      for (const Pair& batch : joined) {
        x.push_back(batch.first);
        y.push_back(batch.second);
      }
      optimizer.zero_grad();
      const Tensor loss = mean_loss(run.net, {torch::cat(x), torch::cat(y)});
      loss.backward();
      run.losses.push_back(loss.item<double>());
      run.norms.push_back(torch::nn::utils::clip_grad_norm_(run.net->parameters(), 0.2));
      optimizer.step();
      decay.step();
    }
  }
  return run;
}

inline double largest_difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  double largest = 0;
  const auto pa = a.parameters(), pb = b.parameters();
  for (size_t i = 0; i < pa.size(); ++i) {
    largest = std::max(largest, (pa[i] - pb[i]).abs().max().item<double>());
  }
  return largest;
}

} // namespace hasten::accelerator_test
