// Reads the batches of a range one by one. Nothing here is called by users.
// Threading: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include "hasten/accelerator/batch.h"
#include "hasten/accelerator/loader_state.h"

namespace hasten::detail {

template <typename Range>
using RangeValue = std::decay_t<decltype(*std::begin(std::declval<Range&>()))>;

// A batch on its way to a rank.
template <typename Value>
struct LoaderItem {
  // Nothing: the round has none for this rank, and none without rows can be made.
  std::optional<Value> batch{};
  int64_t repeated = 0; // rows at its end that are in the epoch before
  int64_t position = 0; // of the range, behind all batches of the round
  uint64_t checksum = 0; // of all that was read up to there; 0: not kept
  std::optional<Value> lent{}; // another rank's, where this one had no row in the first round
  bool stand_in = false; // a batch of before, where this rank has no row
};

// Reads on when it is asked to, never before.
template <typename Range>
class RangeReader {
 public:
  using Item = LoaderItem<RangeValue<Range>>;
  // `random`: what the range draws from, in this thread. `sums`: keeps checksums.
  RangeReader(Range& range, at::Tensor random, bool sums)
      : random_(std::move(random)),
        first_(begin_of(range)),
        last_(std::end(range)),
        sum_(sums ? 1 : 0) {}
  // In a thread of its own, from here on, draws are torch's: all threads share them.
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
