// Norms over many tensors, in one pass over their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "hasten/core/device_scalar.h"

namespace hasten {

/// p-norm of each tensor. p = 1, 2 and infinity run at memory speed on the CPU; 1 and 2 sum 1024
/// elements in fp32 and these sums in fp64. Other p > 0 use ATen. A NaN or infinity in a tensor
/// makes its norm not finite; the first such norm shows the parameter. Local. Throws InputError
/// unless norm_type > 0.
std::vector<double> tensor_norms(const std::vector<at::Tensor>& tensors, double norm_type);

/// p-norm of a tensor from the p-norms of its parts; NaN if one of them is NaN.
double norm_of_norms(const std::vector<double>& norms, double norm_type);

/// p-norm over all elements of all tensors; 0 without tensors. The last bits depend on the order of
/// the tensors, never on their addresses. Does not wait for a device that has all of them.
DeviceScalar gradient_norm(const std::vector<at::Tensor>& tensors, double norm_type);

/// Clamps every element to [-clip_value, clip_value], in place; NaN stays NaN. Throws InputError
/// unless clip_value > 0.
void clip_by_value_(const std::vector<at::Tensor>& tensors, double clip_value);

} // namespace hasten
