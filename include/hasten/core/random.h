// Seeded random streams. Each purpose has its own stream, so that drawing more values from one
// does not change another:
//   init     (seed)               the same on every rank
//   order    (seed, epoch)        the same on every rank
//   dropout  (seed, data rank)    different on every rank
#pragma once

#include <cstdint>
#include <string_view>

namespace hasten {

namespace detail {

/// Mixes `next` into a hash. Multiplicative hashing (Knuth, TAOCP 6.4): the factor is 2^64 divided
/// by the golden ratio.
constexpr uint64_t mix(uint64_t hash, uint64_t next) { return hash * 0x9e3779b97f4a7c15u + next; }

/// Value `index` of the SplitMix64 generator with this seed (Steele, Lea, Flood: Fast splittable
/// pseudorandom number generators, 2014).
constexpr uint64_t splitmix64(uint64_t seed, uint64_t index) {
  uint64_t z = mix(index + 1, seed);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

} // namespace detail

/// The 64-bit seed of the stream `name` for `seed`, `a` and `b`: XXH64 (seed 0) of the bytes of
/// the name, a zero byte, then `seed`, `a`, `b` as little-endian 64-bit words. The same on every
/// machine and in every version.
uint64_t stream_seed(std::string_view name, uint64_t seed, uint64_t a = 0, uint64_t b = 0);

/// Seeds torch's default generators with the init stream. Call it before a model is built, so that
/// all ranks start with equal weights. The weights differ from those after
/// torch::manual_seed(seed), which uses one stream for everything.
void set_seed(uint64_t seed);

/// Seeds torch's default generators with the dropout stream of `data_rank`.
void seed_dropout(uint64_t seed, int data_rank);

/// SplitMix64 generator of the order stream, for shuffling. It does not use the C++ library's
/// distributions, because their results differ between implementations.
class OrderRng {
 public:
  OrderRng(uint64_t seed, uint64_t epoch);
  uint64_t next() { return detail::splitmix64(seed_, drawn_++); }
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
  uint64_t seed_;
  uint64_t drawn_ = 0;
};

} // namespace hasten
