// Reads the batches of a range one by one. Users call nothing here. Threading: one thread at a
// time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include "hasten/loader/batch.h"
#include "hasten/loader/loader_state.h"

namespace hasten::detail {

template <typename Range>
using RangeValue = std::decay_t<decltype(*std::begin(std::declval<Range&>()))>;

// A batch for one rank.
template <typename Value>
struct LoaderItem {
  // Empty: the global batch has none for this rank, and the type allows no batch without samples.
  std::optional<Value> batch{};
  int64_t repeated = 0; // samples at its end that occurred before in the epoch
  int64_t position = 0; // position in the range after the global batch
  uint64_t checksum = 0; // of everything read up to there; 0: not computed
  // Another rank's, if this rank had no sample in the first global batch.
  std::optional<Value> peer_batch{};
  bool stand_in = false; // an earlier batch, if this rank has no sample
};

// Reads a batch when read() is called, never before.
template <typename Range>
class RangeReader {
 public:
  using Item = LoaderItem<RangeValue<Range>>;
  // `random`: the range's generator, in this thread. `sums`: computes checksums.
  RangeReader(Range& range, at::Tensor random, bool sums)
      : random_(std::move(random)),
        first_(begin_of(range)),
        last_(std::end(range)),
        sum_(sums ? 1 : 0) {}
  // `own`: from here on a separate thread reads. Random values then come from torch's generator,
  // which all threads share.
  void read_in_thread(bool own) { random_ = own ? at::Tensor() : random_; }
  std::optional<Item> read() {
    const RangeRandom random(random_);
    if (started_ && !ended_) {
      ++first_;
    }
    started_ = true;
    ended_ = ended_ || !(first_ != last_);
    if (ended_) {
      return std::nullopt;
    }
    Item item;
    item.batch.emplace(*first_);
    if constexpr (requires { first_.repeated_rows(); }) {
      item.repeated = first_.repeated_rows();
    }
    if constexpr (requires { first_.cursor(); }) {
      item.position = first_.cursor();
    } else {
      item.position = ++reads_;
    }
    if (sum_ != 0) {
      item.checksum = sum_ = batch_checksum(sum_, *item.batch) | 1;
    }
    return item;
  }

 private:
  auto begin_of(Range& range) {
    const RangeRandom random(random_);
    return std::begin(range);
  }

  at::Tensor random_;
  decltype(std::begin(std::declval<Range&>())) first_;
  decltype(std::end(std::declval<Range&>())) last_;
  uint64_t sum_;
  int64_t reads_ = 0;
  bool started_ = false;
  bool ended_ = false;
};

} // namespace hasten::detail
