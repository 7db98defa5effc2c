// Attention in bf16 on a CPU: batched products, with softmax, mask and dropout in one fp32 pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten::detail {

/// Whether narrow_attention supports these tensors: bf16 on the CPU.
bool takes_narrow_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

/// self_attention (attention.h) for q, k, v in bf16; the result is bf16. Saves q, k, v and the
/// probabilities in bf16, and one seed. Scores and probabilities are rounded to bf16; everything
/// between is fp32. Can be differentiated once.
at::Tensor narrow_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask, int64_t heads, double dropout);

} // namespace hasten::detail
