// The loss of a language model's last layer without its logits in memory.
// Threading: any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten {

struct LinearCrossEntropy {
  /// Sum over the labels; 0-d fp32, with its graph.
  at::Tensor loss_sum{};
  /// The loss of each token in fp32, 0 where there is no label; the labels' shape, without a graph.
  at::Tensor token_losses{};
};

/// Cross-entropy of linear(hidden, weight) against labels. hidden [..., H], weight [V, H], labels [...]
/// int64; a label of -100 has no loss. It is the loss of torch's linear() and cross_entropy(reduction="sum"),
/// under autocast, too.
/// Computes the logits of a few tokens at a time, and at once their gradients, so that backward computes
/// no logits again. On a CPU, where an eighth of the tokens or more have no label, such as those of a
/// prompt, it computes none for them. Local.
/// Memory: logits of about `slice_bytes` (at least 32 tokens), which become their gradients, and with
/// gradients those of hidden and weight; if one slice has all tokens, and they are at most H, that of the
/// logits in place of the weight's. A hidden or weight without requires_grad has none.
/// `softcap`: the logits become softcap * tanh(logits / softcap), as Gemma 2's do; 0: they stay.
/// Throws InputError for other shapes or dtypes, for a label outside the vocabulary (on a CPU), and in
/// a backward with create_graph.
LinearCrossEntropy linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& labels,
                                        int64_t slice_bytes = int64_t{128} << 20,
                                        double softcap = 0);

/// The labels of causal_lm: each token has the next one's, the last one -100. [B, T] of [B, T].
at::Tensor shifted_labels(const at::Tensor& labels);

} // namespace hasten
