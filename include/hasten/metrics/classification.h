// Accuracy and F1 of a classifier over any number of batches and ranks, in
// constant memory: everything follows from the confusion matrix.
// Threading: one instance per thread. Nothing here communicates: all-reduce the
// state (sum) over ranks, set it, and compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hasten {

/// Of one label, as in scikit-learn with zero_division=0.
struct ClassScores {
  double precision = 0; // true positives / predicted
  double recall = 0; // true positives / rows of the label
  double f1 = 0; // harmonic mean of both
  int64_t support = 0; // rows of the label
};

class ClassificationMetrics {
 public:
  /// `num_labels` ≥ 2. Memory: 8 · num_labels² bytes.
  explicit ClassificationMetrics(int64_t num_labels);

  /// Counts a batch. Local.
  /// Shape: logits [B, num_labels], any float type and device; labels [B] of an
  ///   integer type. B may be 0. Rows with label -100 are not counted.
  /// The prediction is the largest logit; of equal ones the first.
  /// Throws InputError: other shapes, a label outside 0 … num_labels - 1.
  void update(const at::Tensor& logits, const at::Tensor& labels);
  void reset();

  /// The confusion matrix, [num_labels, num_labels] int64 on the CPU; rows are
  /// true labels, columns predictions. It shares memory with this object, so
  /// an all-reduce in place is seen by compute().
  at::Tensor state() const { return confusion_; }
  /// Takes a copy. Throws InputError for another shape or type.
  void set_state(const at::Tensor& state);

  /// Rows counted.
  int64_t rows() const;
  /// "accuracy", and "f1": the mean of F1 over the labels that occur as truth or
  /// as prediction (scikit-learn's average="macro"). Zeros for no rows.
  std::map<std::string, double> compute() const;
  /// [label]
  std::vector<ClassScores> per_class() const;

 private:
  int64_t num_labels_;
  at::Tensor confusion_;
};

} // namespace hasten
