// Base of the metrics of one pass over the data. A metric is updated batch by batch, and its memory
// does not grow with the number of samples. Metrics of different samples can be merged. The value
// does not depend on how samples are split over batches and ranks: bit for bit if the state has
// counts (classification, Auroc, SpearmanCorrCoef), and to about 1e-14 relative if it has sums.
// Nothing here communicates: hasten::Accelerator::reduce(metric) merges the ranks' metrics. A
// metric is a value: a copy has its own state.
// Threading: one instance per thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace hasten {

class Metric {
 public:
  virtual ~Metric() = default;
  /// Everything counted so far: one tensor on the CPU. Its shape and dtype (int64 or double) depend
  /// only on the metric's options. It may share memory with the metric.
  virtual at::Tensor state() const = 0;
  /// Copies `state`. Throws InputError for another shape or dtype.
  virtual void set_state(const at::Tensor& state) = 0;
  /// Adds the state of another instance with the same options. Throws as set_state() does.
  virtual void merge_state(const at::Tensor& other) = 0;
  /// Whether merging adds states. Then an all-reduce (sum) merges the ranks.
  virtual bool state_is_sum() const { return true; }
  /// Returns to the state without samples.
  virtual void reset() = 0;

 protected:
  Metric() = default;
  Metric(const Metric&) = default;
  Metric& operator=(const Metric&) = default;
  Metric(Metric&&) = default;
  Metric& operator=(Metric&&) = default;
};

namespace detail {

/// A metric whose state is a tensor of sums. state() shares memory with the metric: compute() sees
/// an all-reduce in place.
class SumMetric : public Metric {
 public:
  at::Tensor state() const override { return sums_; }
  void set_state(const at::Tensor& state) override;
  void merge_state(const at::Tensor& other) override;
  void reset() override;

 protected:
  /// `where` is for errors: "metrics::Auroc".
  SumMetric(const char* where, at::IntArrayRef sizes, at::ScalarType dtype);
  SumMetric(const SumMetric& other);
  SumMetric& operator=(const SumMetric& other);

  const char* where_;
  at::Tensor sums_;
};

/// A metric whose states are merged by more than a sum.
template <typename Self>
class MergedMetric : public Metric {
 public:
  void set_state(const at::Tensor& state) override {
    Self fresh = static_cast<Self&>(*this);
    fresh.reset();
    fresh.merge_state(state);
    static_cast<Self&>(*this) = std::move(fresh);
  }
  bool state_is_sum() const override { return false; }
};

} // namespace detail

} // namespace hasten
