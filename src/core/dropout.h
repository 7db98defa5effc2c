// Dropout whose mask is a function of one drawn seed. Only the seed is saved for backward. On a CPU
// it takes one pass where torch's kernels take three.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten::detail {

/// residual + dropout(x), or dropout(x) if `residual` is undefined. Each element is zeroed
/// independently with probability p, or scaled by 1 / (1 - p). Draws one 64-bit number from torch's
/// default CPU generator; none for p = 0. x and residual are fp32 or bf16 on the CPU; the sum is
/// fp32 unless both are bf16. Other devices and dtypes use torch's dropout. Differentiable any number of
/// times.
at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p);

/// What decides which elements of a block are dropped: those whose random_bits(index, key0, key1)
/// are below the threshold.
struct BlockDropout {
  uint32_t key0 = 0;
  uint32_t key1 = 0;
  uint32_t threshold = 0; // 0: nothing is dropped
  float scale = 1; // of the other elements
};
/// The keys are mixed from `seed` and the block's number.
BlockDropout block_dropout(uint64_t seed, int64_t block, double p);

/// Draws a seed from torch's default CPU generator.
uint64_t draw_dropout_seed();

} // namespace hasten::detail
