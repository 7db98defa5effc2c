// Input checks of the metrics.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "hasten/metrics/metric.h"

namespace hasten::detail {

inline constexpr int64_t kIgnoredLabel = -100; // as in cross_entropy

/// "Float [3, 4]".
std::string form_text(const at::Tensor& tensor);

/// Predictions and targets of a regression, flattened, as fp64 on the CPU.
struct RegressionBatch {
  at::Tensor predictions{};
  at::Tensor targets{};
};
/// Throws InputError unless both are real and have the same shape. With `one_value` each sample
/// must be one number: [B] or [B, 1].
RegressionBatch regression_batch(const char* where, const at::Tensor& predictions,
                                 const at::Tensor& targets, bool one_value);

} // namespace hasten::detail
