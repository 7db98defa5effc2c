#include "hasten/metrics/multi_label.h"

#include <ATen/ATen.h>

#include "hasten/base/error.h"
#include "metric_checks.h"

namespace hasten {

namespace detail {

/// 2 tp / (predicted + true), or 0 for 0 / 0.
double f1_of(int64_t hits, int64_t predicted, int64_t truth) {
  return ratio_or_zero(2.0 * static_cast<double>(hits), static_cast<double>(predicted + truth));
}

} // namespace detail

MultiLabelMetrics::MultiLabelMetrics(int64_t num_labels, double threshold)
    : SumMetric(
          "metrics::MultiLabelMetrics",
          {3 * detail::at_least("metrics::MultiLabelMetrics", "num_labels", num_labels, 1) + 2},
          at::kLong),
      num_labels_(num_labels),
      threshold_(threshold) {}

void MultiLabelMetrics::update(const at::Tensor& logits, const at::Tensor& labels) {
  const bool fits = logits.dim() == 2 && logits.size(1) == num_labels_ &&
                    logits.is_floating_point() && labels.sizes() == logits.sizes();
  const at::Tensor truth = fits ? labels.detach().to(at::kCPU, at::kDouble) : at::Tensor();
  if (!fits || !truth.eq(0).logical_or(truth.eq(1)).all().item<bool>()) {
    throw InputError(where_,
                     "logits=" + detail::form_text(logits) +
                         ", labels=" + detail::form_text(labels) +
                         (fits ? " with other values than 0 and 1" : ""),
                     "logits and labels [B, " + std::to_string(num_labels_) + "], labels 0 or 1");
  }
  const at::Tensor has = truth.gt(0);
  const at::Tensor said = logits.detach().cpu().gt(threshold_);
  const at::Tensor right = has.eq(said).all(1).sum().reshape({1});
  sums_ += at::cat({has.logical_and(said).sum(0), said.sum(0), has.sum(0),
                    at::full({1}, labels.size(0), at::kLong), right});
}

int64_t MultiLabelMetrics::rows() const { return sums_[3 * num_labels_].item<int64_t>(); }

double MultiLabelMetrics::accuracy() const {
  const auto right = sums_[3 * num_labels_ + 1].item<int64_t>();
  return detail::ratio_or_zero(static_cast<double>(right), static_cast<double>(rows()));
}

std::vector<ClassScores> MultiLabelMetrics::per_class() const {
  const auto* counts = sums_.const_data_ptr<int64_t>();
  std::vector<ClassScores> scores(static_cast<size_t>(num_labels_));
  for (int64_t label = 0; label < num_labels_; ++label) {
    const int64_t hits = counts[label];
    const int64_t predicted = counts[num_labels_ + label];
    const int64_t truth = counts[2 * num_labels_ + label];
    const auto right = static_cast<double>(hits);
    scores[static_cast<size_t>(label)] = {
        .precision = detail::ratio_or_zero(right, static_cast<double>(predicted)),
        .recall = detail::ratio_or_zero(right, static_cast<double>(truth)),
        .f1 = detail::f1_of(hits, predicted, truth),
        .support = truth};
  }
  return scores;
}

double MultiLabelMetrics::f1(Average average) const {
  if (average == Average::micro) {
    const at::Tensor totals = sums_.narrow(0, 0, 3 * num_labels_).view({3, -1}).sum(1);
    const auto* total = totals.const_data_ptr<int64_t>();
    return detail::f1_of(total[0], total[1], total[2]);
  }
  double sum = 0, weights = 0;
  for (const ClassScores& label : per_class()) {
    const double weight = average == Average::weighted ? static_cast<double>(label.support) : 1;
    sum += weight * label.f1;
    weights += weight;
  }
  return detail::ratio_or_zero(sum, weights);
}

std::map<std::string, double> MultiLabelMetrics::compute() const {
  return {
      {"accuracy", accuracy()}, {"f1_micro", f1(Average::micro)}, {"f1_macro", f1(Average::macro)}};
}

} // namespace hasten
