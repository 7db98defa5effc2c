// Multi-head self-attention, with the path that is fast for sentences.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten::detail {

/// softmax(q k^T / sqrt(H / heads) + mask), dropout p, times v, for each head.
/// q [B, Q, H]; k, v [B, T, H]; mask undefined or [B, 1, 1, T] additive.
/// Returns [B, Q, H].
at::Tensor self_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mask, int64_t heads, double dropout);

} // namespace hasten::detail
