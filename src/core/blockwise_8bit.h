// Numbers of 8 bits (Dettmers et al., arXiv 2110.02861), as in bitsandbytes: each is a value of a
// table, times the largest absolute value of its block. A tensor's first block begins at its start.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace hasten::detail {

constexpr int64_t kBlock8Bit = 256;
inline int64_t blocks_8bit(int64_t count) { return (count + kBlock8Bit - 1) / kBlock8Bit; }

/// Ascending: 0, 1, and for i from 0 to 6 the middles of 2^i equal parts of [10^(i-7), 10^(i-6)]
/// with both signs; unsigned: of 2^(i+1) parts.
const std::array<float, 256>& dynamic_map(bool is_signed);

/// For contiguous tensors on one device: lists, because on a device each call costs a launch.
/// `absmax[i]`: fp32 [blocks of codes[i]]. quantize_blockwise() writes it, and the nearest codes.
std::vector<at::Tensor> dequantize_blockwise(const std::vector<at::Tensor>& codes,
                                             const std::vector<at::Tensor>& absmax, bool is_signed);
void quantize_blockwise(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& codes,
                        const std::vector<at::Tensor>& absmax, bool is_signed);

} // namespace hasten::detail
