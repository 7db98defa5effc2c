// Makes the next batches in a background thread while training uses the current one.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "hasten/data/ordered_workers.h"

namespace hasten {

/// Returns the values of `source` in order. Up to `depth` ≥ 1 values are made in advance.
/// Threading: a background thread calls source() from the constructor on, one call at a time, until
/// it returns nullopt or throws. Call next() from one thread. Torch uses as many threads in the
/// background thread as in the caller's.
/// Memory: depth values. source() should draw from its own random generator. If both threads drew
/// from torch's default generator, the order of the draws would vary.
template <typename Value>
class Prefetcher : public OrderedWorkers<Value> {
 public:
  using Source = std::function<std::optional<Value>()>;

  Prefetcher(Source source, int64_t depth)
      : OrderedWorkers<Value>([source = std::move(source)](int64_t) { return source(); },
                              std::numeric_limits<int64_t>::max(), 1, depth, 0) {}
};

} // namespace hasten
