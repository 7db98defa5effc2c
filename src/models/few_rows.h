// The matrix product of generation: a few rows, one for each prompt, times a whole weight. It takes as
// long as reading the weight, which libraries for large products first copy into another order.
#pragma once

#include <ATen/core/Tensor.h>

namespace hasten::detail {

/// fp32 on the CPU without gradients (x was made in inference mode), at most 16 rows, and a weight
/// [out, in] of which one dimension is contiguous.
bool takes_few_rows(const at::Tensor& x, const at::Tensor& weight);

/// x weight^T + bias: x [..., in], weight [out, in], bias [out] or undefined.
at::Tensor few_rows_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

} // namespace hasten::detail
