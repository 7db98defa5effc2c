// Shared by the tests of mixed precision: an fp32 network, a rank's batches, and overflows that a
// test causes in a backward.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/schedule.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/world.h"

namespace hasten::precision_test {

using at::Tensor;

struct WideNetImpl : torch::nn::Module {
  WideNetImpl() {
    first = register_module("first", torch::nn::Linear(16, 32));
    norm = register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{32}));
    second = register_module("second", torch::nn::Linear(32, 4));
  }
  Tensor forward(const Tensor& x) {
    return second->forward(norm->forward(torch::gelu(first->forward(x))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(WideNet);

inline WideNet same_net() {
  torch::manual_seed(11);
  return on_device::moved(WideNet());
}

inline Accelerator accelerator_with(AcceleratorOptions options) {
  options.device = testing_support::run_device().str();
  return Accelerator(options, testing_support::fresh_communicator());
}

// Rows and classes of batch `number`.
inline std::pair<Tensor, Tensor> rows_of(int64_t number, int64_t count = 6) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(500 + number));
  return {on_device::randn({count, 16}, generator),
          on_device::randint(0, 4, {count}, generator, torch::kLong)};
}

inline Tensor sum_of_losses(const std::function<Tensor(const Tensor&)>& forward,
                            const std::pair<Tensor, Tensor>& rows, bool overflows = false) {
  const Tensor logits = forward(rows.first);
  if (overflows) {
    logits.register_hook(
        [](const Tensor& gradient) { return gradient * std::numeric_limits<double>::infinity(); });
  }
  return torch::cross_entropy_loss(logits, rows.second, {}, at::Reduction::Sum);
}

inline std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

inline std::vector<Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<Tensor> result;
  for (const Tensor& parameter : module.parameters()) {
    result.push_back(parameter.grad().clone());
  }
  return result;
}

inline bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) {
    same = torch::equal(a[i], b[i]);
  }
  return same;
}

// |a - b| / |b|, where a and b are each joined to one vector.
inline double distance(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]).to(torch::kDouble).pow(2).sum().item<double>();
    size += b[i].to(torch::kDouble).pow(2).sum().item<double>();
  }
  return std::sqrt(difference / size);
}

// Checksums of the bits. Expects that they are equal on all ranks.
inline void expect_equal_on_ranks(Accelerator& accelerator, const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    const Tensor all =
        accelerator.gather(tensor.detach().to(torch::kDouble).flatten().unsqueeze(0));
    for (int64_t rank = 1; rank < all.size(0); ++rank) {
      EXPECT_TRUE(torch::equal(all[0], all[rank]));
    }
  }
}

enum class Clip { none, norm, value };

// A network with its optimizer and schedule, prepared.
struct Learner {
  explicit Learner(Accelerator& accelerator, bool fused)
      : net(same_net()), schedule(make_optimizer(fused), linear()) {
    auto handles = accelerator.prepare(net, own, schedule);
    optimizer.emplace(std::get<1>(std::move(handles)));
    scheduler.emplace(std::get<2>(std::move(handles)));
  }
  static Schedule linear() { return linear_schedule(2, 20); }
  torch::optim::Optimizer& make_optimizer(bool fused) {
    if (fused) {
      own = std::make_shared<AdamW>(net->parameters(), torch::optim::AdamWOptions(0.01));
    } else {
      own = std::make_shared<torch::optim::AdamW>(net->parameters(),
                                                  torch::optim::AdamWOptions(0.01));
    }
    return *own;
  }
  std::vector<Tensor> moments() const {
    std::vector<Tensor> result;
    for (const auto& entry : own->state()) {
      const auto& state = static_cast<torch::optim::AdamWParamState&>(*entry.second);
      result.push_back(state.exp_avg().clone());
      result.push_back(on_device::tensor(state.step()));
    }
    return result;
  }
  // Runs a window of one batch. Returns whether the optimizer stepped.
  StepResult learn(Accelerator& accelerator, int64_t number, bool overflows, Clip clip) {
    auto window = accelerator.accumulate(net);
    accelerator.backward(
        sum_of_losses([&](const Tensor& x) { return net->forward(x); },
                      rows_of(number + 100 * accelerator.process_index()), overflows),
        6);
    if (clip == Clip::norm) {
      accelerator.clip_grad_norm_(net, 0.5);
    } else if (clip == Clip::value) {
      accelerator.clip_grad_value_(net, 0.01);
    }
    const StepResult result = optimizer->step();
    scheduler->step();
    optimizer->zero_grad();
    return result;
  }
  double rate() const { return schedule.get_last_lr().at(0); }

  WideNet net;
  std::shared_ptr<torch::optim::Optimizer> own{};
  LRScheduler schedule;
  std::optional<PreparedOptimizer<torch::optim::Optimizer>> optimizer{};
  std::optional<PreparedScheduler<LRScheduler>> scheduler{};
};

} // namespace hasten::precision_test
