// The reference of the exactness table: a plain torch loop over joined batches. It includes no
// header of hasten.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace hasten::exactness_test {

using at::Tensor;
using Windows = std::vector<std::vector<int64_t>>; // [step][row of the data]

inline Tensor flat_gradient(const torch::nn::Module& module) {
  std::vector<Tensor> parts;
  for (const Tensor& p : module.parameters()) {
    parts.push_back(p.grad().defined() ? p.grad().flatten() : torch::zeros_like(p).flatten());
  }
  return torch::cat(parts).clone();
}

struct Trained {
  Tensor first_gradient{};
  std::vector<Tensor> parameters{};
};

// `terms(rows)` gives the rows' losses and weights, [B] each, in fp64; a step
// takes the weighted mean's gradient.
template <typename Net, typename Terms>
Trained train_plainly(Net net, const Windows& windows, const Terms& terms) {
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Trained trained;
  for (const auto& rows : windows) {
    sgd.zero_grad();
    const std::pair<Tensor, Tensor> of_rows = terms(net, rows);
    const auto& [losses, weights] = of_rows;
    ((losses * weights).sum() / weights.sum()).backward();
    if (!trained.first_gradient.defined()) {
      trained.first_gradient = flat_gradient(*net);
    }
    sgd.step();
  }
  for (const Tensor& p : net->parameters()) {
    trained.parameters.push_back(p.detach());
  }
  return trained;
}

} // namespace hasten::exactness_test
