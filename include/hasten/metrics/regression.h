// Metrics for regression over any number of batches and ranks, in constant memory and in fp64.
// Predictions and targets are real numbers of any dtype and device. They have the same shape and
// are not broadcast. With a NaN among them the value is NaN.
// Threading: one instance per thread. Nothing here communicates (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "hasten/metrics/metric.h"

namespace hasten {

namespace detail {

/// A mean of errors. state(): double [2]: their sum and count.
class MeanError : public SumMetric {
 protected:
  MeanError();
  void add(const at::Tensor& errors);
  double mean() const;
};

/// Moments of pairs (x, y) without cancellation: means and sums of products of deviations, merged
/// as in Chan, Golub and LeVeque (1979). Means are stored as differences from the first value,
/// because next to a large mean their own rounding error would matter.
struct Moments {
  double count = 0;
  double first_x = 0, first_y = 0;
  double mean_x = 0, mean_y = 0; // minus the first value
  double xx = 0, yy = 0, xy = 0;
  void merge(const Moments& other);
};

} // namespace detail

/// Mean over all elements of (prediction - target)², or its square root. NaN without elements.
class MeanSquaredError : public detail::MeanError {
 public:
  /// `squared` = false returns the square root of the mean.
  explicit MeanSquaredError(bool squared = true) : squared_(squared) {}
  /// Any shape. Throws InputError if the two shapes differ.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;

 private:
  bool squared_;
};

/// Mean over all elements of |prediction - target|. NaN without elements.
class MeanAbsoluteError : public detail::MeanError {
 public:
  /// Any shape. Throws InputError if the two shapes differ.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;
};

/// Coefficient of determination: 1 - Σ(t - p)² / Σ(t - mean t)². As in scikit-learn it is NaN for
/// fewer than two samples. If all targets are equal it is 1 for exact predictions, else 0.
class R2Score : public detail::MergedMetric<R2Score> {
 public:
  /// Shape: both [B] or [B, 1]. Throws InputError for others.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;

  /// double [5]: samples; the targets' first value, mean minus that value, and sum of squared
  /// deviations; sum of squared errors.
  at::Tensor state() const override;
  void merge_state(const at::Tensor& other) override;
  void reset() override;

 private:
  detail::Moments targets_{}; // x
  double squared_errors_ = 0;
};

/// Pearson's correlation coefficient. As in SciPy it is NaN if all predictions or all targets are
/// equal, and for fewer than two samples.
class PearsonCorrCoef : public detail::MergedMetric<PearsonCorrCoef> {
 public:
  /// Shape: both [B] or [B, 1]. Throws InputError for others.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;

  /// double [8]: samples, two first values, two means minus these, three sums of products of
  /// deviations.
  at::Tensor state() const override;
  void merge_state(const at::Tensor& other) override;
  void reset() override;

 private:
  detail::Moments moments_{};
};

/// Spearman's rank correlation with mean ranks for ties, as SciPy's spearmanr.
/// While at most `capacity` distinct (prediction, target) pairs occur, the value is exact, and bit
/// for bit the same for every split. Beyond that only the pairs with the smallest hashes are kept,
/// with their true counts: a uniform sample of the distinct pairs, again the same for every split.
/// The standard error is then about 1 / sqrt(capacity), 0.004 by default.
class SpearmanCorrCoef : public detail::MergedMetric<SpearmanCorrCoef> {
 public:
  /// `capacity` ≥ 2. Memory: up to 80 · capacity bytes; state: 24 · capacity.
  explicit SpearmanCorrCoef(int64_t capacity = 65536);

  /// Shape: both [B] or [B, 1]. Throws InputError for others.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  /// NaN if all predictions or all targets are equal, for fewer than two samples, and if a value
  /// was NaN.
  double compute() const;
  /// Whether all distinct pairs were kept.
  bool is_exact() const;

  /// double [capacity + 1, 3]: (samples, samples with NaN, 0), then (prediction, target, count) by
  /// rising hash, then zeros.
  at::Tensor state() const override;
  void merge_state(const at::Tensor& other) override;
  void reset() override;

 private:
  void add(double x, double y, double count);

  int64_t capacity_;
  double rows_ = 0, nan_rows_ = 0;
  // Number of samples of each pair, [hash, prediction, target]. A pair that was dropped cannot
  // return, because the largest key only decreases.
  std::map<std::tuple<uint64_t, double, double>, double> counts_{};
};

} // namespace hasten
