// Input checks of the metrics.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace hasten::detail {

inline constexpr int64_t kIgnoredLabel = -100; // as in cross_entropy

/// "Float [3, 4]".
std::string form_text(const at::Tensor& tensor);

inline double ratio_or_zero(double part, double whole) { return whole == 0 ? 0 : part / whole; }

/// `value`. Throws InputError "name=value" if it is below `least`.
int64_t at_least(const char* where, const char* name, int64_t value, int64_t least);

/// Throws InputError "what=label" unless all labels are in 0 … count - 1; `skip` says how to leave
/// one out.
void check_labels(const char* where, const at::Tensor& labels, int64_t count, const char* what,
                  const std::string& skip = "-100 to skip a sample");

/// Throws InputError unless `state` has the sizes and dtype of `own`.
void check_metric_state(const char* where, const at::Tensor& state, const at::Tensor& own);

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
