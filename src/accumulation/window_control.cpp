#include "hasten/accumulation/window_control.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

// The vector, fp64, summed over ranks.
enum WindowField {
  kWindowWeight,
  kWindowRows,
  kWindowLoss,
  kWindowNonFinite, // beside the loss: both come from the device
  kWindowFinished,
  kWindowExtra,
  kWindowModels,
  kWindowPrint, // fingerprint of number, models and extra, < 2^16
  kWindowPrintSquared,
  kWindowFields
};

// Multiplicative hashing (Knuth, TAOCP 6.4); small enough that squares of it sum
// exactly in fp64 over a million ranks.
double window_fingerprint(const WindowTotals& window) {
  uint64_t value = window.number * 2 + (window.extra ? 1 : 0);
  value = (value * 0x9e3779b97f4a7c15ull) ^ window.models;
  value *= 0x9e3779b97f4a7c15ull;
  return static_cast<double>(value >> 48);
}

} // namespace detail

WindowControl::WindowControl(
    std::shared_ptr<Communicator> communicator, at::Device device)
    : communicator_(std::move(communicator)), device_(device) {}

void WindowControl::start(
    const WindowTotals& mine, const at::Tensor& loss_stats) {
  using namespace detail;
  std::array<double, kWindowFields> host{};
  host[kWindowWeight] = mine.weight;
  host[kWindowRows] = mine.rows;
  host[kWindowFinished] = mine.finished;
  if (mine.finished == 0) {
    const double print = window_fingerprint(mine);
    host[kWindowExtra] = mine.extra ? 1 : 0;
    host[kWindowModels] = static_cast<double>(mine.models);
    host[kWindowPrint] = print;
    host[kWindowPrintSquared] = print * print;
  }
  values_ = at::tensor(at::ArrayRef<double>(host), at::kDouble).to(device_);
  if (loss_stats.defined()) {
    at::NoGradGuard no_grad;
    values_.narrow(0, kWindowLoss, 2).copy_(loss_stats);
  }
  handle_ =
      communicator_->all_reduce_async(values_, ReduceOp::sum, "window control");
}

WindowTotals WindowControl::wait() {
  using namespace detail;
  handle_.wait();
  const at::Tensor host = values_.cpu();
  const double* sum = host.const_data_ptr<double>();
  WindowTotals totals;
  totals.weight = sum[kWindowWeight];
  totals.rows = sum[kWindowRows];
  totals.loss = sum[kWindowLoss];
  totals.non_finite = sum[kWindowNonFinite];
  totals.finished = static_cast<int>(std::lround(sum[kWindowFinished]));
  const double active = communicator_->world_size() - totals.finished;
  if (active == 0) {
    return totals;
  }
  totals.extra = sum[kWindowExtra] > 0;
  totals.models = static_cast<uint64_t>(sum[kWindowModels] / active);
  // Equality of all: the one case in which the sum's square is as large as
  // `active` times the sum of squares (Cauchy, Schwarz).
  const double print = sum[kWindowPrint];
  if (print * print != active * sum[kWindowPrintSquared]) {
    throw CommunicationError(
        "accumulation::GradientWindow",
        "ranks are in different windows or use different models in one",
        "the same order of accumulate(), backward() and models on every rank",
        "look for a branch in the loop that depends on the rank");
  }
  return totals;
}

} // namespace hasten
