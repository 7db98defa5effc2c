// Parts of kernels that loop over elements. Everything here is inline, so that it is compiled for
// the vector width of the loop that calls it.
#pragma once

#include <bit>
#include <cstdint>

// Compiles a loop for several vector widths. The loader of the library selects the CPU's.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HASTEN_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HASTEN_VECTOR_CLONES
#endif
#define HASTEN_VECTOR_INLINE inline __attribute__((always_inline))

namespace hasten::detail {

/// bf16 is the upper half of fp32.
HASTEN_VECTOR_INLINE float from_bf16(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

/// Rounds to nearest, ties to even.
HASTEN_VECTOR_INLINE uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

/// 32 random bits: a hash of an index and both halves of a key. It uses only integer multiplies and
/// shifts, so that loops vectorise.
HASTEN_VECTOR_INLINE uint32_t random_bits(uint32_t index, uint32_t key0, uint32_t key1) {
  uint32_t h = index * 0x9E3779B9u + key0;
  h = (h ^ (h >> 16)) * 0x21F0AAADu;
  h = ((h ^ (h >> 15)) + key1) * 0x735A2D97u;
  return h ^ (h >> 15);
}

} // namespace hasten::detail
