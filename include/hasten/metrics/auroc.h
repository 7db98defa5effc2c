// Area under the ROC curve of a binary classifier in constant memory, from a
// histogram of scores for each label.
// Threading: one instance per thread. Nothing here communicates
// (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "hasten/metrics/metric.h"

namespace hasten {

struct AurocOptions {
  /// Bins of the histogram, ≥ 2. Memory and state: 16 bytes each.
  int64_t bins = 16384;
  /// False: scores are probabilities. True: they are logits, any real number.
  bool from_logits = false;
};

/// Scores are ordered by their logit log(p / (1 - p)), cut into equal bins over
/// -24 … 24 (0.003 wide with 16384 bins; farther ones are in the end bins), so the
/// resolution near 0 and near 1 is as good as in the middle. Of two rows in one bin
/// neither counts as higher. So the value is exact where no bin holds rows of both
/// labels with different scores, and never off by more than error_bound(): for
/// logits spread over 10 units about 0.0003 at worst, far less in general.
class Auroc : public Metric {
 public:
  explicit Auroc(AurocOptions options = {});

  /// Counts a batch. Local.
  /// Shape: scores [B], or [B, 2] with a column for each label; labels [B] of an
  ///   integer type or bool, 0 or 1; rows with label -100 are not counted.
  /// Throws InputError: other shapes or labels, a probability outside [0, 1].
  void update(const at::Tensor& scores, const at::Tensor& labels);

  /// The probability that a row of label 1 scores above one of label 0, ties one
  /// half: scikit-learn's roc_auc_score. NaN where a label has no rows, or where
  /// any score was NaN.
  double compute() const;
  /// How far compute() may be from the value without bins: half the share of
  /// pairs of both labels that lie in one bin. Equal scores count in it too.
  double error_bound() const;

  /// int64 [2, bins + 1]: rows by label and bin; the last column has NaN scores.
  at::Tensor state() const override { return counts_.tensor; }
  void set_state(const at::Tensor& state) override;
  void merge_state(const at::Tensor& other) override;
  void reset() override;

 private:
  AurocOptions options_;
  detail::OwnTensor counts_{};
};

} // namespace hasten
