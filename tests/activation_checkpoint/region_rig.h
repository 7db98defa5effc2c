// Shared by the tests of regions: small modules, and gradients with and without regions.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/core/memory.h"
#include "support/error_of.h"
#include "support/on_device.h"

namespace hasten::testing_support {

using at::Tensor;
using Options = ActivationCheckpointOptions;

// Two linear layers, dropout and a residual: everything that a region must reproduce.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t width, double p = 0.2)
      : up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))),
        p(p) {
    to(run_device());
  }
  Tensor forward(const Tensor& x) {
    ++calls;
    return x + at::dropout(down(at::gelu(up(x))), p, is_training());
  }
  torch::nn::Linear up, down;
  double p;
  int calls = 0;
};
TORCH_MODULE(Mlp);

inline std::vector<Mlp> make_mlps(int count, int64_t width = 8) {
  torch::manual_seed(11);
  std::vector<Mlp> blocks;
  for (int i = 0; i < count; ++i) {
    blocks.emplace_back(width);
  }
  return blocks;
}

// Gradients of all leaves that `run` depends on, in order, and the generator's state afterwards.
struct Derived {
  std::vector<Tensor> gradients;
  double loss = 0;
  double next_random = 0;
};
inline Derived derive(std::vector<Tensor> leaves, const std::function<Tensor()>& run) {
  for (Tensor& leaf : leaves) {
    leaf.mutable_grad() = Tensor();
  }
  torch::manual_seed(5);
  Tensor loss = run();
  loss.backward();
  Derived result;
  result.loss = loss.item<double>();
  result.next_random = on_device::rand({1}, torch::kDouble).item<double>();
  for (const Tensor& leaf : leaves) {
    result.gradients.push_back(leaf.grad().defined() ? leaf.grad().clone() : Tensor());
  }
  return result;
}
inline void expect_same_bits(const Derived& a, const Derived& b) {
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.next_random, b.next_random) << "the random stream moved";
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    ASSERT_EQ(a.gradients[i].defined(), b.gradients[i].defined()) << i;
    if (a.gradients[i].defined()) {
      EXPECT_TRUE(torch::equal(a.gradients[i], b.gradients[i])) << i;
    }
  }
}

inline std::vector<Tensor> parameters_of(const std::vector<Mlp>& blocks) {
  std::vector<Tensor> all;
  for (const Mlp& block : blocks) {
    for (const Tensor& parameter : block->parameters()) {
      all.push_back(parameter);
    }
  }
  return all;
}

inline void expect_says(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "\"" << word << "\" is not in: " << text;
  }
}

// Recomputations during its life.
class Recomputes {
 public:
  Recomputes() : before_(recompute_counts()) {}
  int64_t count() const { return recompute_counts().recomputed - before_.recomputed; }
  int64_t early() const { return recompute_counts().stopped_early - before_.stopped_early; }

 private:
  RecomputeCounts before_;
};

// Bytes alive beyond those at its beginning.
class LiveBytes {
 public:
  LiveBytes() {
    install_memory_meter();
    before_ = memory_stats(testing_support::run_device()).live_bytes;
  }
  int64_t extra() const { return memory_stats(testing_support::run_device()).live_bytes - before_; }

 private:
  int64_t before_ = 0;
};

} // namespace hasten::testing_support
