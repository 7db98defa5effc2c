// Accuracy, precision, recall, F1 and the Matthews correlation coefficient of a classifier over any
// number of batches and ranks. All follow from the confusion matrix, so memory is constant. Values
// equal scikit-learn's with zero_division=0.
// Threading: one instance per thread. Nothing here communicates (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hasten/metrics/metric.h"

namespace hasten {

/// Scores of one label, as in scikit-learn with zero_division=0.
struct ClassScores {
  double precision = 0; // true positives / predicted
  double recall = 0; // true positives / samples with the label
  double f1 = 0; // harmonic mean of both
  int64_t support = 0; // samples with the label
};

/// How the labels' scores are averaged: scikit-learn's `average`. For its "binary" use
/// per_class()[1].
enum class Average {
  micro, // over all samples; equals the accuracy if each sample has one label
  macro, // mean over the labels that occur as truth or as prediction
  weighted, // mean over the labels, weighted by their number of samples
};

/// state() is the confusion matrix, [num_labels, num_labels] int64. Rows are true labels, columns are
/// predictions.
class ClassificationMetrics : public detail::SumMetric {
 public:
  /// `num_labels` ≥ 2. Memory: 8 · num_labels² bytes.
  explicit ClassificationMetrics(int64_t num_labels);

  /// Counts a batch. Local.
  /// Shape: predictions are logits [B, num_labels] of any float type and device, or predicted
  /// labels [B] of an integer type; labels [B] of an integer type. B may be 0. Samples with label
  /// -100 are not counted. The largest logit is the prediction; the first one if several are equal.
  /// Throws InputError for other shapes and for a label outside 0 … num_labels - 1.
  void update(const at::Tensor& predictions, const at::Tensor& labels);

  /// Number of samples counted.
  int64_t rows() const;
  /// "accuracy" and macro "f1". Both are 0 without samples.
  std::map<std::string, double> compute() const;
  /// [label]
  std::vector<ClassScores> per_class() const;
  /// A copy of the matrix.
  at::Tensor confusion_matrix() const { return sums_.clone(); }
  /// Share of samples that were predicted correctly; 0 without samples.
  double accuracy() const;
  double precision(Average average = Average::macro) const;
  double recall(Average average = Average::macro) const;
  double f1(Average average = Average::macro) const;
  /// Matthews correlation coefficient for any number of labels (Gorodkin's R_K), -1 … 1; 0 if all
  /// labels or all predictions are equal.
  double matthews_corrcoef() const;

 private:
  double average_of(double ClassScores::*score, Average average) const;

  int64_t num_labels_;
};

} // namespace hasten
