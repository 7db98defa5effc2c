// For tests of which batches an optimizer step has: batches of chosen sizes, and the plain torch
// loop whose steps are given as lists of batches.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "accelerator/accelerator_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/world.h"

namespace hasten::accelerator_test {

inline Accelerator accelerator_of(AcceleratorOptions options = {}) {
  options.seed.reset(); // the harness seeds each rank differently
  options.bucket_cap_mb = 2e-4;
  return Accelerator(options,
                     testing_support::fresh_communicator({.timeout = std::chrono::seconds(60),
                                                          .name = testing_support::case_name(),
                                                          .backend = options.backend}));
}

// Differs by rank until it is prepared; then seed 1's everywhere.
inline Net net_of_rank(const Accelerator& accelerator) {
  return net_of_seed(static_cast<uint64_t>(accelerator.process_index()) + 1);
}

// Batches of `rows` rows, the same on every rank.
inline std::vector<Pair> even_batches(int64_t count, int64_t rows = 4) {
  std::vector<Pair> batches;
  for (int64_t b = 0; b < count; ++b) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(500 + b);
    batches.emplace_back(on_device::randn({rows, 5}, generator, torch::kDouble),
                         on_device::randint(0, 3, {rows}, generator, torch::kLong));
  }
  return batches;
}

inline Pair joined(const std::vector<Pair>& batches) {
  std::vector<Tensor> x, y;
  for (const Pair& batch : batches) {
    x.push_back(batch.first);
    y.push_back(batch.second);
  }
  return {torch::cat(x), torch::cat(y)};
}

// The batches of global batch `turn`, one for each rank.
inline std::vector<Pair> global_batch_of(const std::vector<Pair>& batches, int world,
                                         int64_t turn) {
  return joined_window(batches, world, 1, turn);
}

inline Tensor sum_loss(Net& net, const Pair& batch) {
  return torch::nn::functional::cross_entropy(
      net->forward(batch.first), batch.second,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

// The gradients of `loss`, by parameter, on seed 1's weights.
template <typename Loss>
std::vector<Tensor> plain_gradients(Loss loss, uint64_t seed = 1) {
  Net net = net_of_seed(seed);
  loss(net).backward();
  std::vector<Tensor> gradients;
  for (const Tensor& p : net->parameters()) {
    gradients.push_back(p.grad());
  }
  return gradients;
}

inline void expect_gradients(const torch::nn::Module& module, const std::vector<Tensor>& wanted,
                             double times = 1) {
  const auto parameters = module.parameters();
  ASSERT_EQ(parameters.size(), wanted.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_TRUE(parameters[i].grad().defined());
    EXPECT_LE((parameters[i].grad() - wanted[i] * times).abs().max().item<double>(), 1e-12)
        << "parameter " << i;
  }
}

// One SGD step for each list of batches, with their joined mean gradient.
inline Net plain_steps(const std::vector<std::vector<Pair>>& steps, double rate,
                       uint64_t seed = 1) {
  Net net = net_of_seed(seed);
  torch::optim::SGD sgd(net->parameters(), rate);
  for (const auto& step : steps) {
    sgd.zero_grad();
    mean_loss(net, joined(step)).backward();
    sgd.step();
  }
  return net;
}

template <typename Error = InputError, typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline void expect_says(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

inline void expect_equal_on_ranks(Accelerator& accelerator, const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    const Tensor flat = tensor.detach().reshape({1, -1}).to(torch::kDouble);
    EXPECT_TRUE(torch::equal(accelerator.gather(flat).amax(0, true), flat));
    EXPECT_TRUE(torch::equal(accelerator.gather(flat).amin(0, true), flat));
  }
}

// In the second epoch the last rank, or if `alike` all ranks, break after the first turn.
template <typename Range>
std::string said_after_break(Range batches, bool alike) {
  auto accelerator = accelerator_of();
  const int world = accelerator.num_processes();
  Net net = net_of_rank(accelerator);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  return message_of<CommunicationError>(
      [&, &model = model, &optimizer = optimizer, &loader = loader] {
        for (int epoch = 0; epoch < 2; ++epoch) {
          for (const auto& batch : loader) {
            auto window = accelerator.accumulate(model);
            accelerator.backward(mean_loss(model, batch));
            optimizer.step();
            optimizer.zero_grad();
            if (epoch == 1 && (alike || accelerator.process_index() + 1 == world)) {
              break;
            }
          }
        }
        expect_equal_on_ranks(accelerator, alike ? net->parameters() : std::vector<Tensor>());
        accelerator.end_training();
      });
}

} // namespace hasten::accelerator_test
