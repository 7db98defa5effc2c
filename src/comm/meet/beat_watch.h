// Which heartbeats of the peers a rank reads, and for how long each has not changed. Has no thread,
// store or clock.
//
// Note [Heartbeats]
// Each rank writes its heartbeat, and reads those of the ranks in its place on the next kNextHosts
// hosts: the number of keys does not grow with the world. So a rank that falls silent, even with its
// whole host, has a live rank that reads it. Ranks of one host see each other's processes. A rank that
// waits for a group reads its first rank's heartbeat as well, and the first rank all of its group's:
// ranks that are in different operations cannot all agree with the first. All heartbeats are read
// after a failure and on request, at most once in 5 ms per rank of the world.
#pragma once

#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "store.h"

namespace hasten::detail {

/// The ranks in the place of `rank` on the next hosts, of the ranks of each host. [host][place]
std::vector<int> in_place_on_next_hosts(int rank, const std::vector<std::vector<int>>& hosts);

class BeatWatch {
 public:
  using Time = CommClock::time_point;

  /// `neighbours`: the ranks that it always reads. `limit`: time without a heartbeat after which a
  /// rank counts as dead in a small world.
  BeatWatch(int rank, int size, std::vector<int> neighbours, std::chrono::milliseconds limit,
            Time now);

  /// Time between two heartbeats: a 20th of the limit, but at most 1,000 heartbeats a second from
  /// all ranks together.
  std::chrono::milliseconds interval() const { return interval_; }
  /// The limit, but at least five intervals.
  std::chrono::milliseconds limit() const { return limit_; }
  /// From now until the next due() this rank waits for a group of these ranks.
  void waits_for(const std::vector<int>& group);
  /// The next due() has this rank.
  void wants(int rank) { wanted_.insert(rank); }
  /// Ranks whose heartbeats to read now. `all`: request all ranks.
  std::vector<int> due(bool all, Time now);
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

  const int rank_;
  const std::chrono::milliseconds interval_;
  const std::chrono::milliseconds limit_;
  const std::vector<int> neighbours_;
  std::set<int> wanted_;
  std::vector<Seen> seen_; // [rank]
  Time last_merge_;
  Time last_all_{};
};

} // namespace hasten::detail
