// Attention that computes scores in slices, and again in backward, so that they are never all in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace hasten::detail {

struct AttentionOptions {
  int64_t heads = 1;
  /// A divisor of heads, each of which serves several heads of queries.
  int64_t key_value_heads = 1;
  double dropout = 0;
  /// Scores become softcap * tanh(scores / softcap), before the mask. 0: they stay.
  double softcap = 0;
  /// A query attends only to keys up to its own place. Q = T.
  bool causal = false;
};

/// softmax(q k^T / sqrt(width) + mask), dropout, times v, for each head of `width`.
/// q [B, Q, heads * width]; k, v [B, T, key_value_heads * width]; mask undefined or additive,
/// [B or 1, 1, Q or 1, T]. Returns [B, Q, heads * width] in their dtype.
/// Saves q, k, v and one seed. Memory besides: the scores of one sample and 128 queries. In bf16,
/// scores and probabilities are rounded to bf16, and everything between is fp32. Can be differentiated
/// once.
at::Tensor sliced_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask, const AttentionOptions& options);

/// Throws InputError in a backward with create_graph, for kernels that have one derivative only.
void refuse_second_derivative();

/// x [B, T, heads * width] as [B, heads, padded, width], contiguous; tokens from T on are zeros.
at::Tensor heads_first(const at::Tensor& x, int64_t heads, int64_t padded);
/// softcap * tanh(x / softcap); x where softcap is 0.
at::Tensor softcapped(const at::Tensor& x, double softcap);
/// An additive mask as the kernels of a CPU read it; nullopt if it is undefined.
std::optional<at::Tensor> fp32_mask(const at::Tensor& mask);
/// The first `tokens` of x [B, heads, T, width] as [B, tokens, heads * width].
at::Tensor heads_last(const at::Tensor& x, int64_t tokens);

} // namespace hasten::detail
