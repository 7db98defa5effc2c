// What regressions are judged by, over any number of batches and ranks in constant
// memory, in fp64. Predictions and targets are real numbers of any type and device
// and of one shape; they are not broadcast. A NaN among them makes the value NaN.
// Threading: one instance per thread. Nothing here communicates
// (hasten/metrics/metric.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "hasten/metrics/metric.h"

namespace hasten {

namespace detail {

/// A mean of errors: their sum and number.
class MeanError : public Metric {
 public:
  /// double [2]: sum, number.
  at::Tensor state() const override;
  void set_state(const at::Tensor& state) override;
  void merge_state(const at::Tensor& other) override;
  void reset() override;

 protected:
  double sum_ = 0;
  double count_ = 0;
};

/// Moments of numbers, and of pairs of them, without cancellation: means and
/// sums of products of deviations, merged as Chan, Golub and LeVeque (1979) do.
/// Means are kept as their distance from the first number: beside a large mean
/// their own rounding would show.
struct Moments {
  double count = 0;
  double first_x = 0, first_y = 0;
  double mean_x = 0, mean_y = 0; // from the first
  double xx = 0, yy = 0, xy = 0;
  void merge(const Moments& other);
};

} // namespace detail

/// Mean over all elements of (prediction - target)², or its root. NaN for none.
class MeanSquaredError : public detail::MeanError {
 public:
  /// `squared` false: the root of the mean.
  explicit MeanSquaredError(bool squared = true) : squared_(squared) {}
  /// Any shape. Throws InputError: two shapes.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;

 private:
  bool squared_;
};

/// Mean over all elements of |prediction - target|. NaN for none.
class MeanAbsoluteError : public detail::MeanError {
 public:
  /// Any shape. Throws InputError: two shapes.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;
};

/// Share of the targets' variance that the predictions explain:
/// 1 - Σ(t - p)² / Σ(t - mean t)². As in scikit-learn NaN below two rows, and for
/// targets all alike 1 where the predictions are right, else 0.
class R2Score : public Metric {
 public:
  /// Shape: both [B] or [B, 1]. Throws InputError: others.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;

  /// double [5]: rows; the targets' first, mean from it and squared deviations;
  /// squared errors.
  at::Tensor state() const override;
  void set_state(const at::Tensor& state) override;
  void merge_state(const at::Tensor& other) override;
  bool state_is_sum() const override { return false; }
  void reset() override;

 private:
  detail::Moments targets_{}; // x
  double squared_errors_ = 0;
};

/// Pearson's correlation coefficient. As in SciPy NaN where predictions or targets
/// are all alike, and below two rows.
class PearsonCorrCoef : public Metric {
 public:
  /// Shape: both [B] or [B, 1]. Throws InputError: others.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  double compute() const;

  /// double [8]: rows, two first values, two means from them, three sums of
  /// products of deviations.
  at::Tensor state() const override;
  void set_state(const at::Tensor& state) override;
  void merge_state(const at::Tensor& other) override;
  bool state_is_sum() const override { return false; }
  void reset() override;

 private:
  detail::Moments moments_{};
};

/// Spearman's rank correlation, ties ranked by their mean; SciPy's spearmanr.
/// Exact, bit for bit whatever the split, while at most `capacity` different
/// (prediction, target) pairs occur. Beyond that ranks would need all rows: the
/// pairs kept are those with the smallest hashes, a uniform sample of the
/// different pairs with their true counts, again the same for every split. The
/// value then has a standard error of about 1 / sqrt(capacity), 0.004 by default.
class SpearmanCorrCoef : public Metric {
 public:
  /// `capacity` ≥ 2. Memory: up to 80 · capacity bytes; state: 24 · capacity.
  explicit SpearmanCorrCoef(int64_t capacity = 65536);

  /// Shape: both [B] or [B, 1]. Throws InputError: others.
  void update(const at::Tensor& predictions, const at::Tensor& targets);
  /// NaN where predictions or targets are all alike, below two rows, and where any
  /// was NaN.
  double compute() const;
  /// No pair was left out.
  bool is_exact() const;

  /// double [capacity + 1, 3]: (rows, rows with NaN, 0), then (prediction, target,
  /// count), smallest hash first; zeros where unused.
  at::Tensor state() const override;
  void set_state(const at::Tensor& state) override;
  void merge_state(const at::Tensor& other) override;
  bool state_is_sum() const override { return false; }
  void reset() override;

 private:
  struct Pair {
    uint64_t hash = 0;
    double x = 0, y = 0, count = 0;
  };
  void add(double x, double y, double count);
  void compact() const;

  int64_t capacity_;
  double rows_ = 0, nan_rows_ = 0;
  // By hash and values, different, at most capacity_; and what is not in yet.
  mutable std::vector<Pair> kept_{}, pending_{};
  mutable bool full_ = false; // kept_ ends at a hash above which nothing counts
};

} // namespace hasten
