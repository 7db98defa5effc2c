// Batch normalisation with the statistics of all ranks' samples: the function and its derivative.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

// Data shared by the calls of one layer. The graphs that contain these calls keep it alive.
struct SyncLayer {
  std::shared_ptr<Communicator> communicator;
  std::string name{}; // in messages and collectives
  int64_t channels = 0;
  std::function<bool()> rows_count{}; // empty: samples count
};

struct SyncNormArguments {
  at::Tensor weight{}; // [C] or undefined, and the bias
  at::Tensor bias{};
  at::Tensor running_mean{}; // [C] or undefined, and running_var; changed in place
  at::Tensor running_var{};
  double momentum = 0;
  double eps = 0;
};

// `where` of errors.
constexpr const char* kSyncBatchNorm = "parallel::SyncBatchNorm";

// Throws InputError unless x is [N, C, …] with 2 to 5 dimensions.
void check_sync_input(const SyncLayer& layer, const at::Tensor& x);

// Collective. Differentiable in x, weight and bias.
at::Tensor sync_batch_norm(const at::Tensor& x, const SyncNormArguments& arguments,
                           const std::shared_ptr<const SyncLayer>& layer);

// Whether a training forward of the model sends statistics.
bool has_sync_batch_norm(const torch::nn::Module& model);

} // namespace hasten::detail
