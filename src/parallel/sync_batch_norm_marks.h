// Which of torch's batch norm layers are synchronised: a list of the process, and the
// kernel that looks into it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "sync_batch_norm_function.h"

namespace hasten::detail {

// Training forwards of `module` whose running mean, or weight where it has none, is
// `identity` are the layer's from now on; until unmark, or until one of them is gone.
// Returns what unmark takes; 0 where there is a mark already.
uint64_t mark_batch_norm(const at::Tensor& identity,
                         const std::shared_ptr<torch::nn::Module>& module,
                         std::shared_ptr<const SyncLayer> layer);
void unmark_batch_norm(uint64_t id) noexcept;

} // namespace hasten::detail
