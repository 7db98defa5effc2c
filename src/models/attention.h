// Multi-head self-attention, with a path for bf16 on a CPU: batched products, with softmax, mask and
// dropout in one fp32 pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "hasten/models/key_value_cache.h"
#include "hasten/models/pretrained_config.h"
#include "sliced_attention.h"

namespace hasten::detail {

/// softmax(q k^T / sqrt(H / heads) + mask), dropout p, times v, for each head.
/// q [B, Q, H]; k, v [B, T, H]; mask undefined or additive, [B or 1, 1, Q or 1, T].
/// Returns [B, Q, H]. `eager`: by torch's plain operators, differentiable any number of times; otherwise
/// by kernels that can be differentiated once. A softcap (AttentionOptions) needs `eager`.
at::Tensor self_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mask, int64_t heads, double dropout, bool eager = false,
                          double softcap = 0);

/// How a decoder's block computes its attention.
struct AttentionPlace {
  KeyValueCache* cache = nullptr; // null: none
  size_t layer = 0;
  bool sliced = false;
  bool eager = false; // see self_attention
};

/// Attention of each token to those before it. With a cache to all tokens that it has, after adding k
/// and v to it: without dropout and not differentiable. Sliced: by sliced_attention, which needs no
/// mask for the tokens after a token. Otherwise the mask has them.
at::Tensor decoder_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& mask, AttentionOptions options,
                             const AttentionPlace& place);

/// Whether a decoder's attention to `tokens` tokens is sliced, by the configuration's
/// attn_implementation. "auto": from 256 tokens on, where it takes less time as well as less memory.
bool slices_attention(const PreTrainedConfig& config, int64_t tokens, const at::Tensor& hidden);

} // namespace hasten::detail
