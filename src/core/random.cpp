#include "hasten/core/random.h"

#include <ATen/Context.h>
#include <xxhash.h>

#include <string>

namespace hasten {

namespace detail {

void append_little_endian(std::string& bytes, uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    bytes += static_cast<char>(value >> (8 * i) & 0xff);
  }
}

} // namespace detail

uint64_t stream_seed(std::string_view name, uint64_t seed, uint64_t a, uint64_t b) {
  std::string bytes(name);
  bytes += '\0'; // so that no name is a prefix of another
  detail::append_little_endian(bytes, seed);
  detail::append_little_endian(bytes, a);
  detail::append_little_endian(bytes, b);
  return XXH64(bytes.data(), bytes.size(), 0);
}

void set_seed(uint64_t seed) { at::manual_seed(stream_seed("init", seed)); }

void seed_dropout(uint64_t seed, int data_rank) {
  at::manual_seed(stream_seed("dropout", seed, static_cast<uint64_t>(data_rank)));
}

OrderRng::OrderRng(uint64_t seed, uint64_t epoch) : seed_(stream_seed("order", seed, epoch)) {}

uint64_t OrderRng::below(uint64_t bound) {
  // Draws again if the value is one of the 2^64 mod bound smallest, so that the others divide
  // evenly. Rejects at most one draw in two, and almost none for small bounds.
  const uint64_t reject = (0 - bound) % bound;
  uint64_t value = next();
  while (value < reject) {
    value = next();
  }
  return value % bound;
}

} // namespace hasten
