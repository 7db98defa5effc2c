// The list of torch's batch norm layers that are synchronised, and the kernel that reads it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "sync_batch_norm_function.h"

namespace hasten::detail {

// From now on `layer` computes the training forwards of `module`, which are identified by the
// running mean, or by the weight if there is none (`identity`). Ends with unmark or with the
// lifetime of one of them. Returns the id for unmark; 0 if there is already a mark.
uint64_t mark_batch_norm(const at::Tensor& identity,
                         const std::shared_ptr<torch::nn::Module>& module,
                         std::shared_ptr<const SyncLayer> layer);
void unmark_batch_norm(uint64_t id) noexcept;

} // namespace hasten::detail
