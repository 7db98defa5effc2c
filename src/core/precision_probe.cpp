#include "hasten/core/precision_probe.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "hasten/core/autocast.h"
#include "hasten/core/device.h"
#include "hasten/core/linear.h"

namespace hasten {

namespace detail {

// Sizes of a small transformer: conversions take the same share of time as in a run.
constexpr int64_t kProbeRows = 128;
constexpr int64_t kProbeWidth = 512;

/// The shortest of several runs. Seconds.
double probe_seconds(std::optional<at::ScalarType> dtype, int repetitions) {
  const at::AutoGradMode grad(true);
  const AutocastState outside = AutocastState::now();
  const Autocast autocast({.dtype = dtype.value_or(at::kBFloat16), .enabled = dtype.has_value()});
  const at::Tensor x = at::full({kProbeRows, kProbeWidth}, 0.5).requires_grad_();
  const at::Tensor weight = at::full({kProbeWidth, kProbeWidth}, 0.5).requires_grad_();
  double shortest = std::numeric_limits<double>::infinity();
  for (int i = -1; i < repetitions; ++i) { // the first is not counted
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor y = fast_linear(x, weight);
    {
      const Autocast backward(outside);
      y.backward(y.detach());
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (i >= 0) {
      shortest = std::min(shortest, time.count());
    }
  }
  return shortest;
}

} // namespace detail

double precision_speedup(at::ScalarType dtype) {
  static std::mutex mutex;
  static std::map<std::pair<at::ScalarType, int>, double> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair<at::ScalarType, int> key{dtype, at::get_num_threads()};
  if (const auto found = known.find(key); found != known.end()) {
    return found->second;
  }
  const double narrow = detail::probe_seconds(dtype, dtype == at::kHalf ? 1 : 5);
  const double wide = detail::probe_seconds(std::nullopt, 5);
  return known[key] = wide / narrow;
}

std::string why_no_precision(Precision precision, const c10::Device& device) {
  if (precision != Precision::bf16 && precision != Precision::fp16) {
    return {};
  }
  if (!device.is_cpu()) {
    return precision == Precision::bf16 ? detail::why_no_bf16(device) : "";
  }
  try {
    const at::AutoGradMode grad(true);
    const at::Tensor weight = at::full({16, 16}, 0.125).requires_grad_();
    at::Tensor loss;
    {
      const Autocast autocast({.dtype = precision == Precision::bf16 ? at::kBFloat16 : at::kHalf});
      const at::Tensor y = at::gelu(at::linear(at::ones({32, 16}), weight));
      loss = at::mse_loss(at::layer_norm(at::matmul(y, at::softmax(y, -1).t()), {32}),
                          at::ones({32, 32}));
    }
    loss.backward();
    return weight.grad().isfinite().all().item<bool>() ? ""
                                                       : "a small layer's gradient is not finite";
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  }
}

} // namespace hasten
