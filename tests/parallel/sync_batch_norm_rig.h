// Shared by the tests of synchronised batch normalisation: a joined batch that every rank can
// compute, this rank's samples of it, and the results of one process on all samples.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/parallel/sync_batch_norm.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/watched_communicator.h"
#include "support/world.h"

namespace hasten::sync_norm_test {

using at::Tensor;
using testing_support::WatchedCommunicator;

constexpr int64_t kChannels = 3;

/// Samples by rank.
using Split = std::vector<int64_t>;

inline std::vector<Split> splits(int world) {
  switch (world) {
    case 1:
      return {{5}};
    case 2:
      return {{1, 7}, {0, 5}, {3, 3}};
    case 3:
      return {{2, 0, 4}};
    default:
      return {{3, 0, 1, 2}};
  }
}

inline int64_t joined_rows(const Split& split) {
  return std::accumulate(split.begin(), split.end(), int64_t{0});
}

/// Equal on all ranks. Means are large compared with the deviations.
inline Tensor joined_values(const Split& split, std::vector<int64_t> tail, uint64_t seed) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<int64_t> shape{joined_rows(split), kChannels};
  shape.insert(shape.end(), tail.begin(), tail.end());
  return on_device::randn(shape, generator, torch::kDouble) * 2 + 20;
}

inline Tensor rows_of(const Tensor& joined, const Split& split, int rank) {
  const auto first = std::accumulate(split.begin(), split.begin() + rank, int64_t{0});
  return joined.narrow(0, first, split[static_cast<size_t>(rank)]).clone();
}

inline std::vector<double> channel_values(double first) {
  return {first, first + 0.5, first - 0.25};
}

/// A forward's and a backward's results.
struct Norms {
  std::map<std::string, Tensor> tensors{};
};

/// `calls` forwards and backwards of a layer with torch's names. The gradients are those of the
/// last call, as sums over `x`'s samples.
template <typename Layer>
Norms run_layer(Layer& layer, const Tensor& x, const Tensor& dy) {
  const Tensor in = x.clone(at::MemoryFormat::Preserve).requires_grad_();
  for (Tensor& parameter : layer->parameters()) {
    parameter.mutable_grad().reset();
  }
  const Tensor y = layer->forward(in);
  y.backward(dy.to(y.scalar_type()));
  Norms norms;
  norms.tensors = {{"y", y.detach()}, {"dx", in.grad()}};
  for (const auto& parameter : layer->named_parameters()) {
    norms.tensors[parameter.key() + " gradient"] = parameter.value().grad();
  }
  for (const auto& buffer : layer->named_buffers()) {
    norms.tensors[buffer.key()] = buffer.value().clone();
  }
  return norms;
}

template <typename Layer>
void give_values(Layer& layer, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  layer->to(testing_support::run_device(), type);
  layer->weight.copy_(on_device::tensor(channel_values(1)));
  layer->bias.copy_(on_device::tensor(channel_values(-0.5)));
}

/// The results of one process on the joined batch, by torch's kernels.
struct OneProcess : torch::nn::Module {
  OneProcess(int64_t dims, const torch::nn::BatchNormOptions& options) {
    if (dims <= 3) {
      one = register_module("norm", torch::nn::BatchNorm1d(options));
    } else if (dims == 4) {
      two = register_module("norm", torch::nn::BatchNorm2d(options));
    } else {
      three = register_module("norm", torch::nn::BatchNorm3d(options));
    }
  }
  Norms run(const Tensor& x, const Tensor& dy, at::ScalarType type) {
    return one   ? run_in(one, x, dy, type)
           : two ? run_in(two, x, dy, type)
                 : run_in(three, x, dy, type);
  }
  template <typename Layer>
  Norms run_in(Layer& layer, const Tensor& x, const Tensor& dy, at::ScalarType type) {
    if (!ready) {
      give_values(layer, type);
      ready = true;
    }
    return run_layer(layer, x, dy);
  }
  torch::nn::BatchNorm1d one{nullptr};
  torch::nn::BatchNorm2d two{nullptr};
  torch::nn::BatchNorm3d three{nullptr};
  bool ready = false;
};

inline double largest(const Tensor& difference) {
  return difference.numel() == 0 ? 0 : difference.to(torch::kDouble).abs().max().item<double>();
}

/// Compares this rank's `mine` with the results of one process on all samples.
inline void expect_joined(Communicator& communicator, const Norms& mine, const Norms& joined,
                          const Split& split, double tolerance) {
  for (const auto& [name, wanted] : joined.tensors) {
    ASSERT_EQ(mine.tensors.count(name), 1) << name;
    Tensor found = mine.tensors.at(name).to(torch::kDouble).contiguous();
    Tensor expected = wanted.to(torch::kDouble);
    if (name == "y" || name == "dx") {
      expected = rows_of(expected, split, communicator.rank());
    } else if (name.find("gradient") != std::string::npos) {
      communicator.all_reduce(found, ReduceOp::SUM, name);
    } else { // parameters and statistics have the same bits on every rank
      Tensor all = on_device::empty(
          {communicator.world_size(), std::max<int64_t>(found.numel(), 1)}, torch::kDouble);
      communicator.all_gather_async(all, found.reshape({-1}), name).wait();
      for (int rank = 0; rank < communicator.world_size(); ++rank) {
        EXPECT_TRUE(torch::equal(all[rank], all[0])) << name;
      }
    }
    ASSERT_EQ(found.sizes(), expected.sizes()) << name;
    EXPECT_LE(largest(found - expected), tolerance) << name;
  }
}

/// Counts the operations of a communicator.
struct CountedCommunicator {
  explicit CountedCommunicator(std::shared_ptr<Communicator> inner)
      : watched(std::make_shared<WatchedCommunicator>(std::move(inner))) {
    watched->before = [this](std::string_view name) {
      const bool backward = name.find("gradient") != std::string_view::npos;
      ++(backward ? backwards : forwards);
    };
  }
  void reset() { forwards = backwards = 0; }
  std::shared_ptr<WatchedCommunicator> watched;
  int forwards = 0, backwards = 0;
};

inline std::string error_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no InputError";
}

} // namespace hasten::sync_norm_test
