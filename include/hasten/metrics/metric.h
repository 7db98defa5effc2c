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

#include <utility>

namespace hasten {

namespace detail {

/// A tensor that is a value: copying it copies its data.
struct OwnTensor {
  at::Tensor tensor{};
  OwnTensor() = default;
  explicit OwnTensor(at::Tensor t) : tensor(std::move(t)) {}
  OwnTensor(const OwnTensor& other)
      : tensor(other.tensor.defined() ? other.tensor.clone() : at::Tensor()) {}
  OwnTensor& operator=(const OwnTensor& other) {
    tensor = OwnTensor(other).tensor;
    return *this;
  }
  OwnTensor(OwnTensor&&) noexcept = default;
  OwnTensor& operator=(OwnTensor&&) noexcept = default;
  ~OwnTensor() = default;
};

/// Throws InputError unless `state` has the sizes and dtype of `own`.
void check_metric_state(const char* where, const at::Tensor& state, const at::Tensor& own);

} // namespace detail

class Metric {
 public:
  virtual ~Metric() = default;
  /// Everything counted so far: one tensor on the CPU whose shape and dtype
  /// (int64 or double) depend on the metric's options alone. It may share memory
  /// with the metric.
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
