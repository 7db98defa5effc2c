// The older kind of checkpoint, for processes whose autograd engine belongs to
// somebody else: forward runs without gradient, and backward runs it again and
// calls backward inside backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "hasten/activation_checkpoint/activation_checkpoint.h"

namespace hasten::detail {

/// Warns once a process that it is used.
std::vector<at::Tensor> run_reentrant(RegionForward forward, std::vector<at::Tensor> inputs,
                                      const ActivationCheckpointOptions& options);

} // namespace hasten::detail
