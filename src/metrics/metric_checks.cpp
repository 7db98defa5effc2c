#include "metric_checks.h"

#include <ATen/ATen.h>

#include "hasten/base/error.h"
#include "hasten/metrics/metric.h"

namespace hasten::detail {

std::string form_text(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.scalar_type(), " ", tensor.sizes()) : "undefined";
}

int64_t at_least(const char* where, const char* name, int64_t value, int64_t least) {
  if (value < least) {
    throw InputError(where, name + ("=" + std::to_string(value)),
                     "at least " + std::to_string(least));
  }
  return value;
}

void check_labels(const char* where, const at::Tensor& labels, int64_t count, const char* what,
                  const std::string& skip) {
  if (labels.numel() == 0) {
    return;
  }
  const int64_t least = labels.min().item<int64_t>();
  const int64_t most = labels.max().item<int64_t>();
  if (least < 0 || most >= count) {
    throw InputError(where, what + ("=" + std::to_string(least < 0 ? least : most)),
                     "0 to " + std::to_string(count - 1) + ", or " + skip);
  }
}

void check_metric_state(const char* where, const at::Tensor& state, const at::Tensor& own) {
  if (!state.defined() || state.sizes() != own.sizes() ||
      state.scalar_type() != own.scalar_type()) {
    throw InputError(where, "state=" + form_text(state), form_text(own),
                     "merge metrics with equal options");
  }
}

SumMetric::SumMetric(const char* where, at::IntArrayRef sizes, at::ScalarType dtype)
    : where_(where), sums_(at::zeros(sizes, dtype)) {}

SumMetric::SumMetric(const SumMetric& other)
    : Metric(other), where_(other.where_), sums_(other.sums_.clone()) {}

SumMetric& SumMetric::operator=(const SumMetric& other) {
  where_ = other.where_;
  sums_ = other.sums_.clone();
  return *this;
}

void SumMetric::set_state(const at::Tensor& state) {
  check_metric_state(where_, state, sums_);
  sums_.copy_(state);
}

void SumMetric::merge_state(const at::Tensor& other) {
  check_metric_state(where_, other, sums_);
  sums_ += other;
}

void SumMetric::reset() { sums_.zero_(); }

RegressionBatch regression_batch(const char* where, const at::Tensor& predictions,
                                 const at::Tensor& targets, bool one_value) {
  const bool rows =
      !one_value || predictions.dim() == 1 || (predictions.dim() == 2 && predictions.size(1) == 1);
  if (predictions.sizes() != targets.sizes() || !rows || predictions.is_complex() ||
      targets.is_complex()) {
    throw InputError(
        where, "predictions=" + form_text(predictions) + ", targets=" + form_text(targets),
        one_value ? "real numbers of one shape, [B] or [B, 1]" : "real numbers of one shape",
        "squeeze or unsqueeze one of them: shapes are not broadcast");
  }
  const auto flat = [](const at::Tensor& tensor) {
    return tensor.detach().to(at::kCPU, at::kDouble).reshape({-1});
  };
  return {flat(predictions), flat(targets)};
}

} // namespace hasten::detail
