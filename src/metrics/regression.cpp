#include "hasten/metrics/regression.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "metric_checks.h"

namespace hasten {

namespace detail {

constexpr double kNoValue = std::numeric_limits<double>::quiet_NaN();

// Two passes over differences from the first value, so equal values have a deviation of exactly 0.
Moments moments_of(const at::Tensor& x, const at::Tensor& y) {
  Moments moments;
  moments.count = static_cast<double>(x.numel());
  if (x.numel() == 0) {
    return moments;
  }
  moments.first_x = x[0].item<double>();
  moments.first_y = y[0].item<double>();
  const at::Tensor from_x = x - moments.first_x;
  const at::Tensor from_y = y - moments.first_y;
  const at::Tensor mean_x = from_x.mean();
  const at::Tensor mean_y = from_y.mean();
  const at::Tensor dx = from_x - mean_x;
  const at::Tensor dy = from_y - mean_y;
  moments.mean_x = mean_x.item<double>();
  moments.mean_y = mean_y.item<double>();
  moments.xx = dx.square().sum().item<double>();
  moments.yy = dy.square().sum().item<double>();
  moments.xy = (dx * dy).sum().item<double>();
  return moments;
}

void Moments::merge(const Moments& other) {
  if (other.count == 0) {
    return;
  }
  if (count == 0) {
    *this = other;
    return;
  }
  const double total = count + other.count;
  const double share = other.count / total;
  const double dx = (other.first_x - first_x) + (other.mean_x - mean_x);
  const double dy = (other.first_y - first_y) + (other.mean_y - mean_y);
  xx += other.xx + dx * dx * count * share;
  yy += other.yy + dy * dy * count * share;
  xy += other.xy + dx * dy * count * share;
  mean_x += dx * share;
  mean_y += dy * share;
  count = total;
}

MeanError::MeanError() : SumMetric("metrics::MeanError", {2}, at::kDouble) {}

void MeanError::add(const at::Tensor& errors) {
  sums_ +=
      at::tensor({errors.sum().item<double>(), static_cast<double>(errors.numel())}, at::kDouble);
}

double MeanError::mean() const { return sums_[0].item<double>() / sums_[1].item<double>(); }

} // namespace detail

void MeanSquaredError::update(const at::Tensor& predictions, const at::Tensor& targets) {
  const auto batch =
      detail::regression_batch("metrics::MeanSquaredError", predictions, targets, false);
  add((batch.predictions - batch.targets).square());
}

double MeanSquaredError::compute() const { return squared_ ? mean() : std::sqrt(mean()); }

void MeanAbsoluteError::update(const at::Tensor& predictions, const at::Tensor& targets) {
  const auto batch =
      detail::regression_batch("metrics::MeanAbsoluteError", predictions, targets, false);
  add((batch.predictions - batch.targets).abs());
}

double MeanAbsoluteError::compute() const { return mean(); }

void R2Score::update(const at::Tensor& predictions, const at::Tensor& targets) {
  const auto batch = detail::regression_batch("metrics::R2Score", predictions, targets, true);
  targets_.merge(detail::moments_of(batch.targets, batch.targets));
  squared_errors_ += (batch.predictions - batch.targets).square().sum().item<double>();
}

double R2Score::compute() const {
  if (targets_.count < 2) {
    return detail::kNoValue;
  }
  if (targets_.xx == 0 && !std::isnan(squared_errors_)) {
    return squared_errors_ == 0 ? 1 : 0;
  }
  return 1 - squared_errors_ / targets_.xx;
}

at::Tensor R2Score::state() const {
  return at::tensor(
      {targets_.count, targets_.first_x, targets_.mean_x, targets_.xx, squared_errors_},
      at::kDouble);
}

void R2Score::merge_state(const at::Tensor& other) {
  detail::check_metric_state("metrics::R2Score", other, state());
  const auto values = other.accessor<double, 1>();
  targets_.merge({.count = values[0], .first_x = values[1], .mean_x = values[2], .xx = values[3]});
  squared_errors_ += values[4];
}

void R2Score::reset() { *this = R2Score(); }

void PearsonCorrCoef::update(const at::Tensor& predictions, const at::Tensor& targets) {
  const auto batch =
      detail::regression_batch("metrics::PearsonCorrCoef", predictions, targets, true);
  moments_.merge(detail::moments_of(batch.predictions, batch.targets));
}

double PearsonCorrCoef::compute() const {
  if (moments_.count < 2 || moments_.xx == 0 || moments_.yy == 0) {
    return detail::kNoValue;
  }
  const double r = moments_.xy / (std::sqrt(moments_.xx) * std::sqrt(moments_.yy));
  return std::clamp(r, -1.0, 1.0);
}

at::Tensor PearsonCorrCoef::state() const {
  return at::tensor({moments_.count, moments_.first_x, moments_.first_y, moments_.mean_x,
                     moments_.mean_y, moments_.xx, moments_.yy, moments_.xy},
                    at::kDouble);
}

void PearsonCorrCoef::merge_state(const at::Tensor& other) {
  detail::check_metric_state("metrics::PearsonCorrCoef", other, state());
  const auto values = other.accessor<double, 1>();
  moments_.merge(
      {values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7]});
}

void PearsonCorrCoef::reset() { moments_ = {}; }

} // namespace hasten
