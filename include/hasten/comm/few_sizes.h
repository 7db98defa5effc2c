// Messages of any length: their sizes are rounded up to a small set of sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hasten {

class Communicator;

namespace detail {

/// Returns `count` or up to an eighth more, so that messages of any length have few different
/// sizes. Each size that is new to a group costs one shape check through the store.
constexpr int64_t few_sizes(int64_t count) {
  int64_t step = 1;
  while (count > 16 * step) {
    step *= 2;
  }
  return (count + step - 1) / step * step;
}

/// Returns rank `from`'s bytes (1-d, uint8, any number of them) on every rank. The argument of the
/// other ranks is ignored. Collective: a size, then the bytes.
at::Tensor broadcast_bytes(Communicator& communicator, at::Tensor bytes, int from,
                           const char* name);

} // namespace detail

} // namespace hasten
