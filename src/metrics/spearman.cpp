#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <tuple>

#include "hasten/core/random.h"
#include "hasten/metrics/regression.h"
#include "metric_checks.h"

namespace hasten {

namespace detail {

constexpr const char* kSpearman = "metrics::SpearmanCorrCoef";

// Rank of each value, from 1, if value i occurs counts[i] times. Equal values get their mean rank.
std::vector<double> mean_ranks(const std::vector<double>& values,
                               const std::vector<double>& counts) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> ranks(values.size());
  double before = 0;
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin;
    double count = 0;
    for (; end < order.size() && values[order[end]] == values[order[begin]]; ++end) {
      count += counts[order[end]];
    }
    for (size_t i = begin; i < end; ++i) {
      ranks[order[i]] = before + (count + 1) / 2;
    }
    before += count;
    begin = end;
  }
  return ranks;
}

} // namespace detail

SpearmanCorrCoef::SpearmanCorrCoef(int64_t capacity)
    : capacity_(detail::at_least(detail::kSpearman, "capacity", capacity, 2)) {}

void SpearmanCorrCoef::update(const at::Tensor& predictions, const at::Tensor& targets) {
  const auto batch = detail::regression_batch(detail::kSpearman, predictions, targets, true);
  const auto x = batch.predictions.contiguous();
  const auto y = batch.targets.contiguous();
  const auto* px = x.const_data_ptr<double>();
  const auto* py = y.const_data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    rows_ += 1;
    if (std::isnan(px[i]) || std::isnan(py[i])) {
      nan_rows_ += 1;
    } else {
      add(px[i], py[i], 1);
    }
  }
}

void SpearmanCorrCoef::add(double x, double y, double count) {
  x += 0.0; // -0 and 0 are the same value
  y += 0.0;
  const uint64_t hash =
      stream_seed("spearman", 0, std::bit_cast<uint64_t>(x), std::bit_cast<uint64_t>(y));
  counts_[{hash, x, y}] += count;
  if (static_cast<int64_t>(counts_.size()) > capacity_) {
    counts_.erase(std::prev(counts_.end()));
  }
}

bool SpearmanCorrCoef::is_exact() const {
  double counted = nan_rows_;
  for (const auto& [pair, count] : counts_) {
    counted += count;
  }
  return counted == rows_;
}

double SpearmanCorrCoef::compute() const {
  std::vector<double> x, y, counts;
  for (const auto& [pair, count] : counts_) {
    x.push_back(std::get<1>(pair));
    y.push_back(std::get<2>(pair));
    counts.push_back(count);
  }
  const double rows = std::accumulate(counts.begin(), counts.end(), 0.0);
  if (rows < 2 || nan_rows_ > 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto rank_x = detail::mean_ranks(x, counts);
  const auto rank_y = detail::mean_ranks(y, counts);
  const double mean = (rows + 1) / 2;
  double xx = 0, yy = 0, xy = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double dx = rank_x[i] - mean;
    const double dy = rank_y[i] - mean;
    xx += counts[i] * dx * dx;
    yy += counts[i] * dy * dy;
    xy += counts[i] * dx * dy;
  }
  if (xx == 0 || yy == 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return std::clamp(xy / (std::sqrt(xx) * std::sqrt(yy)), -1.0, 1.0);
}

at::Tensor SpearmanCorrCoef::state() const {
  const at::Tensor state = at::zeros({capacity_ + 1, 3}, at::kDouble);
  auto values = state.accessor<double, 2>();
  values[0][0] = rows_;
  values[0][1] = nan_rows_;
  int64_t row = 0;
  for (const auto& [pair, count] : counts_) {
    ++row;
    values[row][0] = std::get<1>(pair);
    values[row][1] = std::get<2>(pair);
    values[row][2] = count;
  }
  return state;
}

void SpearmanCorrCoef::merge_state(const at::Tensor& other) {
  detail::check_metric_state(detail::kSpearman, other, at::empty({capacity_ + 1, 3}, at::kDouble));
  const auto values = other.accessor<double, 2>();
  for (int64_t i = 1; i <= capacity_ && values[i][2] > 0; ++i) {
    add(values[i][0], values[i][1], values[i][2]);
  }
  rows_ += values[0][0];
  nan_rows_ += values[0][1];
}

void SpearmanCorrCoef::reset() { *this = SpearmanCorrCoef(capacity_); }

} // namespace hasten
