#include "hasten/metrics/classification.h"

#include <ATen/ops/argmax.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "hasten/base/error.h"
#include "metric_checks.h"

namespace hasten {

namespace detail {

constexpr const char* kClassificationMetrics = "metrics::ClassificationMetrics";

} // namespace detail

ClassificationMetrics::ClassificationMetrics(int64_t num_labels)
    : SumMetric(detail::kClassificationMetrics,
                {detail::at_least(detail::kClassificationMetrics, "num_labels", num_labels, 2),
                 num_labels},
                at::kLong),
      num_labels_(num_labels) {}

void ClassificationMetrics::update(const at::Tensor& predictions, const at::Tensor& labels) {
  const bool chosen = predictions.dim() == 1 &&
                      at::isIntegralType(predictions.scalar_type(), /*includeBool=*/false);
  const bool logits = predictions.dim() == 2 && predictions.size(1) == num_labels_ &&
                      predictions.is_floating_point();
  if (!(chosen || logits) || labels.dim() != 1 || labels.size(0) != predictions.size(0) ||
      !at::isIntegralType(labels.scalar_type(), /*includeBool=*/false)) {
    throw InputError(
        where_,
        "predictions=" + detail::form_text(predictions) + ", labels=" + detail::form_text(labels),
        "logits [B, " + std::to_string(num_labels_) +
            "] or predicted labels [B], and labels [B] of an integer type");
  }
  if (labels.size(0) == 0) {
    return;
  }
  const auto truth = labels.detach().to(at::kCPU, at::kLong);
  const auto predicted =
      (logits ? predictions.detach().argmax(1) : predictions.detach()).to(at::kCPU, at::kLong);
  const auto kept = truth.ne(detail::kIgnoredLabel);
  const auto rows = truth.masked_select(kept);
  const auto columns = predicted.masked_select(kept);
  detail::check_labels(where_, rows, num_labels_, "label");
  detail::check_labels(where_, columns, num_labels_, "predicted label");
  sums_ += at::bincount(rows * num_labels_ + columns, {}, num_labels_ * num_labels_)
               .view({num_labels_, num_labels_});
}

int64_t ClassificationMetrics::rows() const { return sums_.sum().item<int64_t>(); }

std::vector<ClassScores> ClassificationMetrics::per_class() const {
  const auto cells = sums_.accessor<int64_t, 2>();
  std::vector<ClassScores> scores(num_labels_);
  for (int64_t label = 0; label < num_labels_; ++label) {
    int64_t truth = 0;
    int64_t predicted = 0;
    for (int64_t other = 0; other < num_labels_; ++other) {
      truth += cells[label][other];
      predicted += cells[other][label];
    }
    const auto right = static_cast<double>(cells[label][label]);
    scores[label] = {.precision = detail::ratio_or_zero(right, static_cast<double>(predicted)),
                     .recall = detail::ratio_or_zero(right, static_cast<double>(truth)),
                     .f1 = detail::ratio_or_zero(2 * right, static_cast<double>(truth + predicted)),
                     .support = truth};
  }
  return scores;
}

std::map<std::string, double> ClassificationMetrics::compute() const {
  return {{"accuracy", accuracy()}, {"f1", f1()}};
}

double ClassificationMetrics::accuracy() const {
  return detail::ratio_or_zero(static_cast<double>(sums_.trace().item<int64_t>()),
                               static_cast<double>(rows()));
}

double ClassificationMetrics::average_of(double ClassScores::*score, Average average) const {
  if (average == Average::micro) {
    return accuracy(); // one label per sample: an error is a false negative and a false positive
  }
  const auto scores = per_class();
  const auto predicted = sums_.sum(0);
  double sum = 0;
  double weights = 0;
  for (int64_t label = 0; label < num_labels_; ++label) {
    const auto support = static_cast<double>(scores[label].support);
    const bool occurs = support > 0 || predicted[label].item<int64_t>() > 0;
    const double weight = average == Average::weighted ? support : (occurs ? 1 : 0);
    sum += weight * (scores[label].*score);
    weights += weight;
  }
  return detail::ratio_or_zero(sum, weights);
}

double ClassificationMetrics::precision(Average average) const {
  return average_of(&ClassScores::precision, average);
}

double ClassificationMetrics::recall(Average average) const {
  return average_of(&ClassScores::recall, average);
}

double ClassificationMetrics::f1(Average average) const {
  return average_of(&ClassScores::f1, average);
}

double ClassificationMetrics::matthews_corrcoef() const {
  const auto matrix = sums_.to(at::kDouble);
  const auto truth = matrix.sum(1);
  const auto predicted = matrix.sum(0);
  const double n = matrix.sum().item<double>();
  const double covariance = matrix.trace().item<double>() * n - truth.dot(predicted).item<double>();
  const double of_truth = n * n - truth.dot(truth).item<double>();
  const double of_predicted = n * n - predicted.dot(predicted).item<double>();
  return of_truth == 0 || of_predicted == 0
             ? 0
             : covariance / (std::sqrt(of_truth) * std::sqrt(of_predicted));
}

} // namespace hasten
