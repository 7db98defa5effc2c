// Norms of many tensors as one vector, in one pass over their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace hasten {

/// Each tensor's p-norm. p = 1, 2 or infinity: summed in fp32 over 1024 numbers, then
/// in fp64, at memory's speed on the CPU; other p > 0 by ATen's. NaN and infinity of
/// a tensor are in its norm: the first that is not finite names the parameter. Local.
std::vector<double> tensor_norms(const std::vector<at::Tensor>& tensors, double norm_type);

/// The p-norm of a whole, from its parts' p-norms; NaN where one is.
double norm_of_norms(const std::vector<double>& norms, double norm_type);

/// The p-norm over all of them together; 0 for none. Depends on the tensors' order,
/// not on where they lie.
double gradient_norm(const std::vector<at::Tensor>& tensors, double norm_type);

/// Every number to within [-clip_value, clip_value], in place; NaN stays. clip_value
/// > 0, else InputError.
void clip_by_value_(const std::vector<at::Tensor>& tensors, double clip_value);

} // namespace hasten
