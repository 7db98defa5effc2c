// Dropout whose mask is a function of one drawn seed: nothing but the seed is kept
// for backward, and on a CPU one pass does what torch's kernels do in three.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten::detail {

/// residual + dropout(x), or dropout(x) where `residual` is undefined. Each
/// element is zeroed independently with probability p, or scaled by 1 / (1 - p).
/// One 64-bit number is drawn from torch's default CPU generator. p = 0 draws
/// nothing. Other devices and dtypes than float on a CPU take torch's dropout.
at::Tensor dropout_add(
    const at::Tensor& x, const at::Tensor& residual, double p);

/// A fresh seed from torch's default CPU generator.
uint64_t draw_dropout_seed();

/// out[i] = in[i] * (kept ? scale : 0) (+ residual[i]) for `count` elements at
/// stream position `first` (a multiple of 4096). in == out is allowed.
void apply_dropout(
    const float* in,
    const float* residual,
    float* out,
    int64_t first,
    int64_t count,
    uint64_t seed,
    double p);

} // namespace hasten::detail
