#include "hasten/metrics/classification.h"

#include <ATen/ops/argmax.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/zeros.h>

#include <sstream>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

constexpr const char* kClassificationMetrics = "metrics::ClassificationMetrics";
constexpr int64_t kIgnoredLabel = -100; // as in cross_entropy

std::string sizes_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

double ratio_or_zero(double part, double whole) {
  return whole == 0 ? 0 : part / whole;
}

} // namespace detail

ClassificationMetrics::ClassificationMetrics(int64_t num_labels)
    : num_labels_(num_labels) {
  if (num_labels < 2) {
    throw InputError(
        detail::kClassificationMetrics,
        "num_labels=" + std::to_string(num_labels),
        "at least 2");
  }
  confusion_ = at::zeros({num_labels, num_labels}, at::kLong);
}

void ClassificationMetrics::update(
    const at::Tensor& logits, const at::Tensor& labels) {
  if (logits.dim() != 2 || logits.size(1) != num_labels_ || labels.dim() != 1 ||
      labels.size(0) != logits.size(0) ||
      !at::isIntegralType(labels.scalar_type(), /*includeBool=*/false)) {
    throw InputError(
        detail::kClassificationMetrics,
        "logits=" + detail::sizes_text(logits) +
            ", labels=" + detail::sizes_text(labels) + " " +
            c10::toString(labels.scalar_type()),
        "logits [B, " + std::to_string(num_labels_) +
            "] and labels [B] of an integer type");
  }
  if (logits.size(0) == 0) {
    return;
  }
  const auto truth = labels.detach().to(at::kCPU, at::kLong);
  const auto predicted = logits.detach().argmax(1).to(at::kCPU);
  const auto kept = truth.ne(detail::kIgnoredLabel);
  const auto rows = truth.masked_select(kept);
  if (rows.numel() == 0) {
    return;
  }
  const int64_t least = rows.min().item<int64_t>();
  const int64_t most = rows.max().item<int64_t>();
  if (least < 0 || most >= num_labels_) {
    throw InputError(
        detail::kClassificationMetrics,
        "label=" + std::to_string(least < 0 ? least : most),
        "0 to " + std::to_string(num_labels_ - 1) + ", or -100 to skip a row");
  }
  const auto cells = rows * num_labels_ + predicted.masked_select(kept);
  confusion_ += at::bincount(cells, {}, num_labels_ * num_labels_)
                    .view({num_labels_, num_labels_});
}

void ClassificationMetrics::reset() { confusion_.zero_(); }

void ClassificationMetrics::set_state(const at::Tensor& state) {
  if (state.sizes() != confusion_.sizes() || state.scalar_type() != at::kLong) {
    throw InputError(
        detail::kClassificationMetrics,
        "state=" + detail::sizes_text(state) + " " +
            c10::toString(state.scalar_type()),
        detail::sizes_text(confusion_) + " Long");
  }
  confusion_.copy_(state);
}

int64_t ClassificationMetrics::rows() const {
  return confusion_.sum().item<int64_t>();
}

std::vector<ClassScores> ClassificationMetrics::per_class() const {
  const auto cells = confusion_.accessor<int64_t, 2>();
  std::vector<ClassScores> scores(num_labels_);
  for (int64_t label = 0; label < num_labels_; ++label) {
    int64_t truth = 0;
    int64_t predicted = 0;
    for (int64_t other = 0; other < num_labels_; ++other) {
      truth += cells[label][other];
      predicted += cells[other][label];
    }
    const auto right = static_cast<double>(cells[label][label]);
    scores[label] = {
        .precision =
            detail::ratio_or_zero(right, static_cast<double>(predicted)),
        .recall = detail::ratio_or_zero(right, static_cast<double>(truth)),
        .f1 = detail::ratio_or_zero(
            2 * right, static_cast<double>(truth + predicted)),
        .support = truth};
  }
  return scores;
}

std::map<std::string, double> ClassificationMetrics::compute() const {
  const auto scores = per_class();
  const auto predicted = confusion_.sum(0);
  double f1 = 0;
  double right = 0;
  int64_t occurring = 0;
  for (int64_t label = 0; label < num_labels_; ++label) {
    if (scores[label].support > 0 || predicted[label].item<int64_t>() > 0) {
      f1 += scores[label].f1;
      ++occurring;
    }
    right += static_cast<double>(confusion_[label][label].item<int64_t>());
  }
  return {
      {"accuracy", detail::ratio_or_zero(right, static_cast<double>(rows()))},
      {"f1", detail::ratio_or_zero(f1, static_cast<double>(occurring))}};
}

} // namespace hasten
