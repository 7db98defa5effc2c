// What a rank reads of its peers' beats, and how long their silence is. Has no thread,
// no store and no clock of its own.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "store.h"

namespace hasten::detail {

/// An exchange reads the beats of at most kNeighbours ranks, those that follow in the
/// ring: whoever falls silent, with its whole host too, has a living rank before it. All
/// are read where somebody asks, not more often than the store can bear.
class BeatWatch {
 public:
  static constexpr int kNeighbours = 63;
  using Time = CommClock::time_point;

  /// `limit`: silence that is death in a small world.
  BeatWatch(int rank, int size, std::chrono::milliseconds limit, Time now);

  /// Between two beats: a 20th of the limit, at most 1,000 beats a second of all ranks.
  std::chrono::milliseconds interval() const { return interval_; }
  /// The limit, at least five intervals.
  std::chrono::milliseconds limit() const { return limit_; }
  /// Ranks to read now; `all`: everybody.
  const std::vector<int>& due(bool all, Time now);
  /// What was read of them.
  void merge(const std::vector<int>& ranks, std::vector<std::string> beats, Time now);
  /// Empty where it was not read so far.
  const std::string& beat(int rank) const { return of(rank).beat; }
  /// How long the beat had been the same when it was last read.
  CommClock::duration silence(int rank) const { return of(rank).read - of(rank).changed; }

 private:
  struct Seen {
    std::string beat;
    Time changed;
    Time read;
  };
  const Seen& of(int rank) const { return seen_[static_cast<size_t>(rank)]; }

  const std::chrono::milliseconds interval_;
  const std::chrono::milliseconds limit_;
  std::vector<int> neighbours_;
  std::vector<int> all_;
  std::vector<Seen> seen_; // [rank]
  Time last_merge_;
  Time last_all_{};
};

} // namespace hasten::detail
