// Shared by the window's tests: a small model in fp64 with a tied and a frozen parameter, samples
// that depend on rank and time, and the gradient of the joined batch by a plain torch loop without
// hasten.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/on_device.h"

namespace hasten::window_test {

using at::Tensor;

struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 6));
    middle = register_module("middle", torch::nn::Linear(6, 6));
    frozen = register_module("frozen", torch::nn::Linear(6, 4));
    last = register_module("last", torch::nn::Linear(4, 3));
    tied = register_parameter("tied", middle->weight);
    unused = register_parameter("unused", on_device::randn({7}));
    for (auto& p : frozen->parameters()) {
      p.set_requires_grad(false);
    }
    to(testing_support::run_device(), torch::kDouble);
  }
  Tensor forward(Tensor x) {
    x = torch::tanh(first->forward(x));
    x = torch::tanh(middle->forward(x));
    x = torch::tanh(torch::linear(x, tied)); // the same tensor again
    return last->forward(torch::tanh(frozen->forward(x)));
  }
  torch::nn::Linear first{nullptr}, middle{nullptr}, frozen{nullptr}, last{nullptr};
  Tensor tied, unused;
};
TORCH_MODULE(TiedNet);

struct Rows {
  Tensor x, y;
  int64_t count() const { return x.size(0); }
};

// 1 to 4 samples. They depend only on the arguments.
inline Rows make_rows(int64_t window, int64_t rank, int64_t micro) {
  const int64_t n = 1 + (window + 2 * rank + 3 * micro) % 4;
  auto generator =
      torch::make_generator<at::CPUGeneratorImpl>(1000 + 100 * window + 10 * rank + micro);
  return {on_device::randn({n, 5}, generator, torch::kDouble),
          on_device::randint(0, 3, {n}, generator, torch::kLong)};
}

inline Tensor loss_sum(const Tensor& logits, const Tensor& y) {
  return torch::nn::functional::cross_entropy(
      logits, y, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}
inline Tensor loss_mean(const Tensor& logits, const Tensor& y) {
  return torch::nn::functional::cross_entropy(logits, y);
}

inline TiedNet net_of_seed(uint64_t seed) {
  torch::manual_seed(seed);
  return TiedNet();
}

// The joined batch's mean gradient by name, on rank 0's weights (seed 1).
// `extra` is added to each batch's loss sum.
inline std::map<std::string, Tensor> joined_gradient(const std::vector<Rows>& batches,
                                                     bool twice = false) {
  TiedNet net = net_of_seed(1);
  Tensor sum = on_device::zeros({}, torch::kDouble);
  int64_t rows = 0;
  for (const Rows& batch : batches) {
    const Tensor logits = net->forward(batch.x);
    sum = sum + loss_sum(logits, batch.y);
    if (twice) {
      sum = sum + logits.square().sum() / logits.size(1);
    }
    rows += batch.count();
  }
  (sum / static_cast<double>(rows)).backward();
  std::map<std::string, Tensor> gradients;
  for (const auto& item : net->named_parameters()) {
    gradients[item.key()] = item.value().grad();
  }
  return gradients;
}

} // namespace hasten::window_test
