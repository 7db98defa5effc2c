// Rounds message sizes up to a small set of sizes.
#pragma once

#include <cstdint>

namespace hasten::detail {

/// Returns `count` or up to an eighth more, so that messages of any length have few different
/// sizes. Each size that is new to a group costs one shape check through the store.
constexpr int64_t few_sizes(int64_t count) {
  int64_t step = 1;
  while (count > 16 * step) {
    step *= 2;
  }
  return (count + step - 1) / step * step;
}

} // namespace hasten::detail
