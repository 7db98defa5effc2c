// Attention in bf16 on a CPU: plain batched products, whose softmax, mask and dropout
// are one pass in fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten::detail {

/// Whether narrow_attention takes these: bf16 on the CPU.
bool takes_narrow_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

/// What self_attention (attention.h) says, for q, k, v in bf16; result in bf16. Stores
/// the three and the probabilities, in bf16, and one seed. Scores and probabilities
/// are rounded to bf16, all between is fp32. Differentiable once.
at::Tensor narrow_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask, int64_t heads, double dropout);

} // namespace hasten::detail
