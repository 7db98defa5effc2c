// Reentrant checkpoint, for processes with another autograd engine: forward runs without gradient;
// backward runs it again and calls backward inside backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "hasten/activation_checkpoint/activation_checkpoint.h"

namespace hasten::detail {

/// Logs a warning once per process.
std::vector<at::Tensor> run_reentrant(RegionForward forward, std::vector<at::Tensor> inputs,
                                      const ActivationCheckpointOptions& options);

} // namespace hasten::detail
