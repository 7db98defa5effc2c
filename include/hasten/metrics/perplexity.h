// Perplexity: exp of the mean negative log likelihood over all tokens of any number of batches and
// ranks. It is not a mean of the batches' means.
// Threading: one instance per thread. Nothing here communicates (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "hasten/metrics/metric.h"

namespace hasten {

/// state(): double [2]: sum of losses, tokens.
class Perplexity : public detail::SumMetric {
 public:
  /// Tokens with label `ignore_index` are not counted.
  explicit Perplexity(int64_t ignore_index = -100);

  /// Counts the tokens of a batch. Local.
  /// Shape: logits [..., vocabulary] (not probabilities), labels [...] int64. Nothing is shifted:
  /// for a causal model shift the labels first. Memory: one fp32 copy of the logits.
  /// Throws InputError for other shapes and for a label outside the vocabulary.
  void update(const at::Tensor& logits, const at::Tensor& labels);
  /// Adds an existing loss: `loss_sum` is the sum of the negative log likelihoods of `tokens` ≥ 0
  /// tokens.
  void update(double loss_sum, double tokens);

  /// NaN if no token was counted; infinity if a token had probability 0.
  double compute() const;
  double tokens() const;

 private:
  int64_t ignore_index_;
};

} // namespace hasten
