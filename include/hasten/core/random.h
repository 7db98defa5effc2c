// Seeded random streams. Each purpose has its own stream, so that drawing more
// from one never moves another:
//   init     (seed)               the same on every rank
//   order    (seed, epoch)        the same on every rank
//   dropout  (seed, data rank)    different on every rank
#pragma once

#include <cstdint>
#include <string_view>

namespace hasten {

/// A 64-bit seed for the stream `name` with its coordinates: XXH64 (seed 0) of
/// the name's bytes, a zero byte, then `seed`, `a`, `b` as little-endian 64-bit
/// words. Same arguments, same seed, on every machine and in every version.
uint64_t stream_seed(std::string_view name, uint64_t seed, uint64_t a = 0, uint64_t b = 0);

/// Seeds torch's default generators with the init stream: call before a model
/// is built, so that all ranks start from equal weights. Not the weights that
/// torch::manual_seed(seed) gives: those share their stream with all else.
void set_seed(uint64_t seed);

/// Seeds torch's default generators with the dropout stream of `data_rank`.
void seed_dropout(uint64_t seed, int data_rank);

/// SplitMix64 generator of the order stream, for shuffling; independent of the
/// C++ library's distributions, whose results differ between implementations.
class OrderRng {
 public:
  OrderRng(uint64_t seed, uint64_t epoch);
  uint64_t next();
  /// Uniform in 0 … bound - 1, without modulo bias; bound ≥ 1.
  uint64_t below(uint64_t bound);
  /// Fisher-Yates over [first, first + count).
  template <typename T>
  void shuffle(T* first, uint64_t count) {
    for (uint64_t i = count; i > 1; --i) {
      const uint64_t j = below(i);
      T t = first[i - 1];
      first[i - 1] = first[j];
      first[j] = t;
    }
  }

 private:
  uint64_t state_;
};

} // namespace hasten
