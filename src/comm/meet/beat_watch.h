// Which heartbeats of the peers a rank reads, and for how long each has not changed. Has no thread,
// store or clock.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "store.h"

namespace hasten::detail {

/// Each exchange with the store reads the heartbeats of at most kNeighbours ranks: those that
/// follow this rank in the ring. So a rank that falls silent, even with its whole host, has a live
/// rank before it. All heartbeats are read on request, at most once in 5 ms per rank of the world.
class BeatWatch {
 public:
  static constexpr int kNeighbours = 63;
  using Time = CommClock::time_point;

  /// `limit`: time without a heartbeat after which a rank counts as dead in a small world.
  BeatWatch(int rank, int size, std::chrono::milliseconds limit, Time now);

  /// Time between two heartbeats: a 20th of the limit, but at most 1,000 heartbeats a second from
  /// all ranks together.
  std::chrono::milliseconds interval() const { return interval_; }
  /// The limit, but at least five intervals.
  std::chrono::milliseconds limit() const { return limit_; }
  /// Ranks whose heartbeats to read now. `all`: request all ranks.
  const std::vector<int>& due(bool all, Time now);
  /// Stores the heartbeats that were read.
  void merge(const std::vector<int>& ranks, std::vector<std::string> beats, Time now);
  /// The last heartbeat of the rank; empty if it has not been read.
  const std::string& beat(int rank) const { return of(rank).beat; }
  /// For how long the heartbeat had not changed when it was last read.
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
