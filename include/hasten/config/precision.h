// The dtype in which a run computes. Does not use LibTorch.
#pragma once

#include <array>
#include <cstddef>

#include "hasten/config/spelling.h"

namespace hasten {

/// In all of them parameters, gradients, moments, normalisations and losses are fp32. The 16-bit
/// ones compute matrix products, and save tensors for backward, in 16 bits
/// (docs/guides/mixed-precision.md).
enum class Precision {
  /// Everything in fp32.
  no,
  fp32 = no,
  /// 8 bits of exponent, 7 of fraction: the range of fp32 with two to three decimal digits.
  bf16,
  /// 5 bits of exponent, 10 of fraction: the maximum is 65504, and the loss is scaled.
  fp16,
  /// bf16 if it is clearly faster than fp32 on every rank's machine (kWorthwhileSpeedup), else
  /// fp32.
  automatic,
};

template <>
inline constexpr auto kSpellings<Precision> = std::array{"fp32", "bf16", "fp16", "auto"};

constexpr const char* precision_name(Precision precision) {
  return kSpellings<Precision>.at(static_cast<size_t>(precision));
}

} // namespace hasten
