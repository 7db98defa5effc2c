// Area under the ROC curve of a binary classifier. Uses constant memory: one histogram of scores
// per label.
// Threading: one instance per thread. Nothing here communicates (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "hasten/metrics/metric.h"

namespace hasten {

struct AurocOptions {
  /// Bins of the histogram, ≥ 2. Memory and state: 16 bytes per bin.
  int64_t bins = 16384;
  /// False: scores are probabilities. True: scores are logits (any real number).
  bool from_logits = false;
};

/// Scores are ordered by their logit log(p / (1 - p)). The range -24 … 24 is divided into equal
/// bins, 0.003 wide with 16384 bins; values outside fall into the end bins. So the resolution near
/// 0 and 1 is as good as in the middle. Two samples in one bin count as tied. The value is exact
/// unless a bin has samples of both labels with different scores, and never off by more than
/// error_bound(): about 0.0003 at worst for logits spread over 10 units, usually far less.
/// state(): int64 [2, bins + 1], number of samples by label and bin. The last column counts NaN
/// scores.
class Auroc : public detail::SumMetric {
 public:
  explicit Auroc(AurocOptions options = {});

  /// Counts a batch. Local.
  /// Shape: scores [B], or [B, 2] with one column per label; labels [B] of an integer type or bool,
  /// 0 or 1. Samples with label -100 are not counted.
  /// Throws InputError for other shapes or labels, and for a probability outside [0, 1].
  void update(const at::Tensor& scores, const at::Tensor& labels);

  /// Probability that a sample of label 1 has a higher score than a sample of label 0; ties count
  /// one half. Equals scikit-learn's roc_auc_score. NaN if a label has no samples or a score was
  /// NaN.
  double compute() const;
  /// Upper bound of the error of compute() from binning: half the share of pairs of both labels
  /// that fall into one bin. Pairs with equal scores count too, although they cause no error.
  double error_bound() const;

 private:
  AurocOptions options_;
};

} // namespace hasten
