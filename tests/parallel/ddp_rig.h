// Shared by the tests of Ddp: one sum over ranks, and the gradient of the joined batch by a plain
// torch loop without hasten.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/parallel/ddp.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::ddp_test {

using at::Tensor;
using testing_support::fresh_communicator;

// rank + 1 rows of `width`. They depend only on rank and turn.
inline Tensor rows_of(int rank, int64_t width, int turn = 0) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(50 + rank + 100 * turn);
  return on_device::randn({rank + 1, width}, generator, torch::kDouble);
}

// One reduced sum. `loss(rank)` is this rank's loss, undefined if it has no batch.
template <typename Loss>
void reduce_once(Ddp& ddp, int rank, const Loss& loss, double factor = 1) {
  ddp.begin();
  const Tensor mine = loss(rank);
  ddp.start_backward(true, {.loss = mine});
  if (mine.defined()) {
    mine.backward();
  }
  ddp.finish_backward();
  ddp.finish(factor);
}

// The gradient of the sum over ranks of loss(rank), by plain torch and by name. It is undefined if
// no loss depends on the parameter.
template <typename Loss>
std::vector<std::pair<std::string, Tensor>> plain_gradient(torch::nn::Module& plain, int world,
                                                           const Loss& loss) {
  Tensor sum;
  for (int rank = 0; rank < world; ++rank) {
    const Tensor of_rank = loss(rank);
    if (of_rank.defined()) {
      sum = sum.defined() ? sum + of_rank : of_rank;
    }
  }
  sum.backward();
  std::vector<std::pair<std::string, Tensor>> gradients;
  for (const auto& item : plain.named_parameters()) {
    gradients.emplace_back(item.key(), item.value().grad());
  }
  return gradients;
}

inline void expect_equal_gradients(const torch::nn::Module& module,
                                   const std::vector<std::pair<std::string, Tensor>>& wanted,
                                   double tolerance = 1e-12) {
  const auto parameters = module.named_parameters();
  for (const auto& [name, gradient] : wanted) {
    const Tensor mine = parameters[name].grad();
    ASSERT_EQ(mine.defined(), gradient.defined()) << name;
    if (mine.defined()) {
      EXPECT_LE((mine - gradient).abs().max().to(torch::kDouble).item<double>(), tolerance) << name;
    }
  }
}

inline std::string what_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

// Three parts in fp64; a loss may use any of them. `part[i]` is twice as wide as it is long.
struct PartsImpl : torch::nn::Module {
  explicit PartsImpl(uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < 3; ++i) {
      parts.push_back(register_module("part" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
    to(testing_support::run_device(), torch::kDouble);
  }
  // The sum of squares after the listed parts, in that order.
  Tensor loss(const Tensor& x, const std::vector<int>& use) {
    Tensor y = x;
    for (const int i : use) {
      y = torch::tanh(parts[static_cast<size_t>(i)]->forward(y));
    }
    return y.square().sum();
  }
  std::vector<torch::nn::Linear> parts{};
};
TORCH_MODULE(Parts);

// Puts every tensor of Parts into a separate bucket.
constexpr DdpOptions kTinyBuckets{.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5};

} // namespace hasten::ddp_test
