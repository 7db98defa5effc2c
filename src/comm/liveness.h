// Who of a world is alive, what each rank is doing, and the first failure, kept
// by one thread with its own connection to the store. The beats carry what each
// rank last entered, so that a timeout can name who is missing without asking
// a rank that may be frozen.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "beat_watch.h"
#include "hasten/comm/handshake.h"
#include "store.h"

namespace hasten::detail {

/// Why a world died.
struct FailureCause {
  /// Rank that found it, as messages call it.
  int found_by = 0;
  /// Operation that rank was in, all_reduce "x"; empty where none was.
  std::string operation;
  /// "rank 2 died (process 77 ended)".
  std::string text;
  /// What to do about it.
  std::string fix;
  /// Ranks that are no more, where that is the cause.
  std::vector<int> lost{};
  /// Of the reader: a rank below it, on its host, lived when it read this.
  bool said_by_peer = false;
};

/// The operation a group entered last. Written by the thread that issues
/// operations, read by the beat.
struct GroupProgress {
  std::string group;
  mutable std::mutex mutex;
  uint64_t sequence = 0;
  std::string operation; // all_reduce "x"
  std::string tensors; // "sum of Float [3]"; empty where it has none
  uint64_t exchanges = 0; // in which every rank waits for a value of each other
};

struct LivenessConfig {
  World world{};
  /// The watch's own connection, which nobody else uses.
  StorePtr store{};
  /// [rank]
  std::vector<Hello> peers{};
  std::chrono::milliseconds heartbeat_timeout{5000};
  /// Called once, in any thread, when the world has failed.
  std::function<void()> on_failure{};
};

class Liveness {
 public:
  /// Store keys: beat/<rank>, failure. They must exist before the start:
  /// the handshake writes them.
  static std::string beat_key(int rank);
  static constexpr const char* kFailureKey = "failure";
  /// What the failure key holds while there is none.
  static constexpr const char* kNoFailure = "-";
  static constexpr const char* kFirstBeat = "a 0 {}";

  explicit Liveness(LivenessConfig config);
  /// Leaves without a word.
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  std::shared_ptr<GroupProgress> add_group(const std::string& name);

  /// Cheap; true from the first failure on.
  bool failed() const;
  /// For threads that wait, at least every 100 ms: fails the world when the store of
  /// another host has not answered for the heartbeat limit, or rank 0 of this host is
  /// stopped for as long, which the thread stuck in a call to its store cannot say.
  void poll_store();
  FailureCause cause() const;
  /// Reports a failure to the world; the first report of all ranks is the
  /// cause everywhere. Waits for the store's answer at most `limit`; without
  /// one the own report is the cause here.
  void fail(FailureCause cause, std::chrono::milliseconds limit);

  /// Asks for a look at the peers now. Waits until one that began after the
  /// call has ended, at most `limit`; true where it has.
  bool look(std::chrono::milliseconds limit);
  /// Why `operation`, the group's `sequence`-th, is not through: who has not
  /// entered it, is stopped or silent, of the group's members. As known by the
  /// last look.
  std::string describe_missing(const std::string& group, const std::vector<int>& members,
                               uint64_t sequence, const std::string& operation) const;
  /// Whether a member does another thing as the operation in which this rank waits for
  /// values, or has gone past it without: "rank 1 has all_reduce "x" of …"; empty where
  /// none does. As known by the last look.
  std::string describe_other(const GroupProgress& own, const std::vector<int>& members) const;
  /// Ranks that have left the world by close().
  std::vector<int> left_ranks() const;
  /// True where each peer has left, ended, or seen the failure.
  bool everybody_knows() const;
  /// Who does not go on: ended, silent for the heartbeat limit, left, or the
  /// failure's cause. Goes on to be looked at after the failure. [rank]
  std::vector<bool> lost() const;
  /// Deaths are no failure any more: the ranks are parting.
  void expect_departures();
  /// Says in the store that this rank leaves, then stops. Bounded by `limit`.
  void leave(std::chrono::milliseconds limit);
  /// Stops without a word. Bounded by `limit`.
  void stop(std::chrono::milliseconds limit);

 private:
  struct Peer {
    bool left = false;
    bool knows_failure = false;
    bool ended = false; // its process on this host is gone
    bool silent = false; // for the heartbeat limit, on another host
    CommClock::time_point stopped{}; // since when a signal has; epoch: it runs
  };
  struct Shared;

  /// What a peer's beat says of a group.
  struct Entered {
    uint64_t sequence = 0; // 0: no operation yet
    std::string operation{};
    std::string tensors{};
    uint64_t exchanges = 0;
  };

  static void run(const std::shared_ptr<Shared>& shared);
  static Entered entered(const std::string& beat, const std::string& group);

  std::shared_ptr<Shared> shared_;
};

} // namespace hasten::detail
