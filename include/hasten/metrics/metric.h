// What metrics of one pass over the data share: they count batch by batch in a
// memory that does not grow with the rows, and two that counted different rows can
// be merged. Splitting the same rows over batches and ranks in any way gives the
// same value: to the last bit where the state counts (classification, Auroc,
// SpearmanCorrCoef), to about 1e-14 relative where it sums.
// Nothing here communicates: hasten::Accelerator::reduce(metric) joins ranks.
// Metrics are values: copying one copies what it has seen.
// Threading: one instance per thread.
#pragma once

#include <ATen/core/Tensor.h>

namespace hasten {

class Metric {
 public:
  virtual ~Metric() = default;
  /// Everything counted so far: one tensor on the CPU whose shape and dtype
  /// (int64 or double) depend on the metric's options alone. A copy.
  virtual at::Tensor state() const = 0;
  /// Takes a copy of a state. Throws InputError for another shape or dtype.
  virtual void set_state(const at::Tensor& state) = 0;
  /// Adds what another instance with the same options has seen.
  virtual void merge_state(const at::Tensor& other) = 0;
  /// True where merging is adding, so that an all-reduce (sum) joins ranks.
  virtual bool state_is_sum() const { return true; }
  /// Forgets everything.
  virtual void reset() = 0;

 protected:
  Metric() = default;
  Metric(const Metric&) = default;
  Metric& operator=(const Metric&) = default;
  Metric(Metric&&) = default;
  Metric& operator=(Metric&&) = default;
};

} // namespace hasten
