// The list of torch's batch norm layers that are synchronised, and the kernel that reads it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>

#include "sync_batch_norm_function.h"

namespace hasten::detail {

// One of torch's layers that is synchronised.
struct BatchNormMark;

// While the mark lives, `layer` computes the training forwards of `module`, which are identified by
// the running mean, or by the weight if there is none (`identity`). Null if there is already a mark.
std::shared_ptr<const BatchNormMark> mark_batch_norm(
    const at::Tensor& identity, const std::shared_ptr<torch::nn::Module>& module,
    std::shared_ptr<const SyncLayer> layer);

} // namespace hasten::detail
