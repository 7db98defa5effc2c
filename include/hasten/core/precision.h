// In which type a run computes. Without LibTorch.
#pragma once

namespace hasten {

/// Parameters, gradients, moments, normalisations and losses are fp32 in all of
/// them; the others make the matrix products, and what is stored for backward, of 16
/// bits (docs/guides/mixed-precision.md).
enum class Precision {
  /// Everything in fp32.
  no,
  fp32 = no,
  /// 8 bits of exponent, 7 of fraction: the range of fp32, between two and three
  /// decimal digits.
  bf16,
  /// 5 bits of exponent, 10 of fraction: nothing above 65504; the loss is scaled.
  fp16,
  /// bf16 where every rank's machine computes it distinctly quicker than fp32, else
  /// fp32.
  automatic,
};

/// "fp32", "bf16", "fp16", "auto".
constexpr const char* precision_name(Precision precision) {
  switch (precision) {
    case Precision::no:
      return "fp32";
    case Precision::bf16:
      return "bf16";
    case Precision::fp16:
      return "fp16";
    case Precision::automatic:
      break;
  }
  return "auto";
}

} // namespace hasten
