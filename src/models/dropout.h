// Dropout whose mask is a function of one drawn seed: nothing but the seed is kept
// for backward, and on a CPU one pass does what torch's kernels do in three.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten::detail {

/// residual + dropout(x), or dropout(x) where `residual` is undefined. Each
/// element is zeroed independently with probability p, or scaled by 1 / (1 - p).
/// One 64-bit number is drawn from torch's default CPU generator. p = 0 draws
/// nothing. x and residual fp32 or bf16: the sum is fp32 unless both are bf16. Other
/// devices and dtypes than these on a CPU take torch's dropout.
at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p);

/// A fresh seed from torch's default CPU generator.
uint64_t draw_dropout_seed();

/// Of elements block * 4096 and on, mixed from it: two keys for dropout_keeps().
uint64_t dropout_block_key(uint64_t seed, uint64_t block);

} // namespace hasten::detail
