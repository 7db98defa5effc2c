// Multi-head self-attention, with a path for bf16 on a CPU: batched products, with softmax, mask and
// dropout in one fp32 pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "hasten/models/key_value_cache.h"

namespace hasten::detail {

/// softmax(q k^T / sqrt(H / heads) + mask), dropout p, times v, for each head.
/// q [B, Q, H]; k, v [B, T, H]; mask undefined or additive, [B or 1, 1, Q or 1, T].
/// Returns [B, Q, H].
at::Tensor self_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mask, int64_t heads, double dropout);

/// A cache's place of one block; no cache: null.
struct CachePlace {
  KeyValueCache* cache = nullptr;
  size_t layer = 0;
};

/// self_attention without dropout to all tokens that the cache has, after adding k and v
/// [B, T, key_value_heads * width] to it. q [B, T, heads * width]. Not differentiable.
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask, int64_t heads, int64_t key_value_heads,
                            const CachePlace& place);

/// Whether narrow_attention supports these tensors: bf16 on the CPU.
bool takes_narrow_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

/// self_attention for q, k, v in bf16; the result is bf16. Saves q, k, v and the probabilities in
/// bf16, and one seed. Scores and probabilities are rounded to bf16; everything between is fp32. Can
/// be differentiated once.
at::Tensor narrow_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask, int64_t heads, double dropout);

} // namespace hasten::detail
