// Accuracy, precision, recall, F1 and the correlation coefficient of a classifier
// over any number of batches and ranks, in constant memory: everything follows
// from the confusion matrix. Values are scikit-learn's with zero_division=0.
// Threading: one instance per thread. Nothing here communicates
// (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hasten/metrics/metric.h"

namespace hasten {

/// Of one label, as in scikit-learn with zero_division=0.
struct ClassScores {
  double precision = 0; // true positives / predicted
  double recall = 0; // true positives / rows of the label
  double f1 = 0; // harmonic mean of both
  int64_t support = 0; // rows of the label
};

/// How the scores of labels become one, as scikit-learn's `average`. Its "binary"
/// is per_class()[1].
enum class Average {
  micro, // over all rows: accuracy, where each row has one label
  macro, // mean over the labels that occur as truth or as prediction
  weighted, // mean over the labels by their rows
};

class ClassificationMetrics : public Metric {
 public:
  /// `num_labels` ≥ 2. Memory: 8 · num_labels² bytes.
  explicit ClassificationMetrics(int64_t num_labels);

  /// Counts a batch. Local.
  /// Shape: logits [B, num_labels], any float type and device; or predicted
  ///   labels [B] of an integer type. labels [B] of an integer type. B may be 0.
  ///   Rows with label -100 are not counted.
  /// The prediction is the largest logit; of equal ones the first.
  /// Throws InputError: other shapes, a label outside 0 … num_labels - 1.
  void update(const at::Tensor& predictions, const at::Tensor& labels);
  void reset() override;

  /// The confusion matrix, [num_labels, num_labels] int64 on the CPU; rows are
  /// true labels, columns predictions. It shares memory with this object, so
  /// an all-reduce in place is seen by compute().
  at::Tensor state() const override { return confusion_.tensor; }
  /// Takes a copy. Throws InputError for another shape or type.
  void set_state(const at::Tensor& state) override;
  void merge_state(const at::Tensor& other) override;

  /// Rows counted.
  int64_t rows() const;
  /// "accuracy" and macro "f1". Zeros for no rows.
  std::map<std::string, double> compute() const;
  /// [label]
  std::vector<ClassScores> per_class() const;
  /// A copy of the matrix.
  at::Tensor confusion_matrix() const { return confusion_.tensor.clone(); }
  /// Rows predicted right / rows; 0 for no rows.
  double accuracy() const;
  double precision(Average average = Average::macro) const;
  double recall(Average average = Average::macro) const;
  double f1(Average average = Average::macro) const;
  /// Matthews correlation coefficient for any number of labels (Gorodkin's
  /// R_K), -1 … 1; 0 where truth or prediction is one label throughout.
  double matthews_corrcoef() const;

 private:
  double average_of(double ClassScores::*score, Average average) const;

  int64_t num_labels_;
  detail::OwnTensor confusion_{};
};

} // namespace hasten
