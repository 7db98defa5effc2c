#include "hasten/metrics/auroc.h"

#include <ATen/ATen.h>

#include <limits>

#include "hasten/base/error.h"
#include "metric_checks.h"

namespace hasten {

namespace detail {

constexpr double kLogitRange = 24; // logits beyond ±24 share the end bins

struct AurocSums {
  double positives = 0;
  double negatives = 0;
  double above = 0; // pairs whose positive is in the higher bin
  double together = 0; // pairs whose samples share a bin
  bool has_nan = false;
};

AurocSums auroc_sums(const at::Tensor& counts) {
  const auto cells = counts.accessor<int64_t, 2>();
  const int64_t bins = counts.size(1) - 1;
  AurocSums sums;
  for (int64_t bin = 0; bin < bins; ++bin) {
    const auto positive = static_cast<double>(cells[1][bin]);
    const auto negative = static_cast<double>(cells[0][bin]);
    sums.above += positive * sums.negatives;
    sums.together += positive * negative;
    sums.positives += positive;
    sums.negatives += negative;
  }
  sums.has_nan = cells[0][bins] + cells[1][bins] > 0;
  return sums;
}

} // namespace detail

Auroc::Auroc(AurocOptions options)
    : SumMetric("metrics::Auroc",
                {2, detail::at_least("metrics::Auroc", "bins", options.bins, 2) + 1}, at::kLong),
      options_(options) {}

void Auroc::update(const at::Tensor& scores, const at::Tensor& labels) {
  const bool columns = scores.dim() == 2 && scores.size(1) == 2;
  if (!(columns || scores.dim() == 1) || !scores.is_floating_point() || labels.dim() != 1 ||
      labels.size(0) != scores.size(0) ||
      !at::isIntegralType(labels.scalar_type(), /*includeBool=*/true)) {
    throw InputError(
        where_, "scores=" + detail::form_text(scores) + ", labels=" + detail::form_text(labels),
        "scores [B] or [B, 2] of a float type and labels [B] of an integer type");
  }
  const auto truth = labels.detach().to(at::kCPU, at::kLong);
  const auto kept = truth.ne(detail::kIgnoredLabel);
  const auto rows = truth.masked_select(kept);
  if (rows.numel() == 0) {
    return;
  }
  if (rows.lt(0).logical_or(rows.gt(1)).any().item<bool>()) {
    throw InputError(where_,
                     "labels from " + std::to_string(rows.min().item<int64_t>()) + " to " +
                         std::to_string(rows.max().item<int64_t>()),
                     "0 and 1, or -100 to skip a sample");
  }
  const auto all = scores.detach().to(at::kCPU, at::kDouble);
  auto logits = !columns               ? all
                : options_.from_logits ? all.select(1, 1) - all.select(1, 0)
                                       : all.select(1, 1);
  logits = logits.masked_select(kept);
  if (!options_.from_logits) {
    if (logits.lt(0).logical_or(logits.gt(1)).any().item<bool>()) {
      throw InputError(where_,
                       "scores from " + std::to_string(logits.min().item<double>()) + " to " +
                           std::to_string(logits.max().item<double>()),
                       "probabilities, 0 to 1", "set from_logits");
    }
    logits = logits.log() - logits.neg().log1p();
  }
  const double scale = static_cast<double>(options_.bins) / (2 * detail::kLogitRange);
  const auto bins = ((logits + detail::kLogitRange) * scale)
                        .floor()
                        .clamp(0, static_cast<double>(options_.bins - 1))
                        .masked_fill(logits.isnan(), static_cast<double>(options_.bins))
                        .to(at::kLong);
  const int64_t row = options_.bins + 1;
  sums_ += at::bincount(rows * row + bins, {}, 2 * row).view({2, row});
}

double Auroc::compute() const {
  const auto sums = detail::auroc_sums(sums_);
  if (sums.has_nan || sums.positives == 0 || sums.negatives == 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return (sums.above + sums.together / 2) / (sums.positives * sums.negatives);
}

double Auroc::error_bound() const {
  const auto sums = detail::auroc_sums(sums_);
  if (sums.positives == 0 || sums.negatives == 0) {
    return 0;
  }
  return sums.together / 2 / (sums.positives * sums.negatives);
}

} // namespace hasten
