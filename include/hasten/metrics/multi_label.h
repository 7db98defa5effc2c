// F1 of a multi-label classifier over any number of batches and ranks, in constant memory. Values
// equal scikit-learn's with zero_division=0.
// Threading: one instance per thread. Nothing here communicates (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hasten/metrics/classification.h"
#include "hasten/metrics/metric.h"

namespace hasten {

/// state(): int64 [3 · num_labels + 2]: true positives by label, predicted by label, true by label,
/// samples, samples whose labels are all correct.
class MultiLabelMetrics : public detail::SumMetric {
 public:
  /// `num_labels` ≥ 1. A label is predicted if its logit is above `threshold`; 0 is a probability
  /// of one half. Memory: 24 · num_labels bytes.
  explicit MultiLabelMetrics(int64_t num_labels, double threshold = 0);

  /// Counts a batch. Local.
  /// Shape: logits [B, num_labels] of a floating type; labels [B, num_labels] of any type, 0 or 1.
  /// B may be 0. Throws InputError for other shapes and labels.
  void update(const at::Tensor& logits, const at::Tensor& labels);

  /// Number of samples counted.
  int64_t rows() const;
  /// micro: over all labels of all samples. macro: mean over the labels. weighted: mean over the
  /// labels, weighted by their number of samples.
  double f1(Average average) const;
  /// Share of samples whose labels are all correct; 0 without samples.
  double accuracy() const;
  /// [label]
  std::vector<ClassScores> per_class() const;
  /// "accuracy", "f1_micro", "f1_macro".
  std::map<std::string, double> compute() const;

 private:
  int64_t num_labels_;
  double threshold_;
};

} // namespace hasten
