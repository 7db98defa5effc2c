#include "hasten/metrics/perplexity.h"

#include <ATen/ATen.h>

#include <cmath>

#include "hasten/base/error.h"
#include "metric_checks.h"

namespace hasten {

Perplexity::Perplexity(int64_t ignore_index)
    : SumMetric("metrics::Perplexity", {2}, at::kDouble), ignore_index_(ignore_index) {}

void Perplexity::update(const at::Tensor& logits, const at::Tensor& labels) {
  if (logits.dim() < 2 || !logits.is_floating_point() ||
      labels.sizes() != logits.sizes().slice(0, logits.dim() - 1) ||
      labels.scalar_type() != at::kLong) {
    throw InputError(
        where_, "logits=" + detail::form_text(logits) + ", labels=" + detail::form_text(labels),
        "logits [..., vocabulary] of a float type and labels [...] of int64");
  }
  const auto flat = logits.detach().reshape({-1, logits.size(-1)});
  const auto truth = labels.detach().reshape({-1}).to(logits.device());
  const auto kept = truth.ne(ignore_index_);
  const auto tokens = truth.masked_select(kept);
  if (tokens.numel() == 0) {
    return;
  }
  detail::check_labels(where_, tokens, logits.size(-1), "label",
                       std::to_string(ignore_index_) + " to skip a token");
  const auto type = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto losses = at::log_softmax(flat, 1, type)
                          .gather(1, truth.masked_fill(~kept, 0).unsqueeze(1))
                          .squeeze(1)
                          .masked_select(kept);
  update(-losses.sum(at::kDouble).item<double>(), static_cast<double>(tokens.numel()));
}

void Perplexity::update(double loss_sum, double tokens) {
  if (!(tokens >= 0)) {
    throw InputError(where_, "tokens=" + std::to_string(tokens), "at least 0");
  }
  sums_ += at::tensor({loss_sum, tokens}, at::kDouble);
}

double Perplexity::tokens() const { return sums_[1].item<double>(); }

double Perplexity::compute() const {
  return std::exp(sums_[0].item<double>() / tokens()); // 0 / 0 is NaN
}

} // namespace hasten
