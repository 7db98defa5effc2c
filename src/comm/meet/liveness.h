// Monitors the ranks of a world: who is alive, what each rank is doing, and the first failure. One
// thread does so over its own connection to the store. Each heartbeat names the operation that the
// rank entered last, so a timeout can name the missing rank without asking it (it may be frozen).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "beat_watch.h"
#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/comm/handshake.h"
#include "store.h"

namespace hasten::detail {

/// Why a world failed.
struct FailureCause {
  /// The rank that found the failure, with the number that messages use.
  int found_by = 0;
  /// The operation that this rank was in, like all_reduce "x"; empty if none.
  std::string operation;
  /// "rank 2 died (process 77 ended)".
  std::string text;
  /// What the user can do about it.
  std::string fix;
  /// The ranks whose loss is the cause.
  std::vector<int> lost{};
  ErrorKind kind = ErrorKind::other;
  /// On the rank that reads it: a lower live rank of this host reports the failure, too.
  bool said_by_peer = false;
};

/// The operation that a group entered last. Written by the thread that issues operations, read
/// for the heartbeat.
struct GroupProgress {
  std::string group;
  mutable std::mutex mutex;
  uint64_t sequence = 0;
  std::string operation; // all_reduce "x"
  std::string tensors; // "sum of Float [3]"; empty for an operation without tensors
  uint64_t exchanges = 0; // those in which every rank waits for the others' values
};

struct LivenessConfig {
  World world{};
  /// A connection that only Liveness uses.
  StorePtr store{};
  /// [rank]
  std::vector<Hello> peers{};
  std::chrono::milliseconds heartbeat_timeout{5000};
  /// Called once, in any thread, when the world fails.
  std::function<void()> on_failure{};
};

class Liveness {
 public:
  /// Store keys: beat/<rank>, failure. The handshake must write them before Liveness starts.
  static std::string beat_key(int rank);
  static constexpr const char* kFailureKey = "failure";
  /// Value of the failure key while there is no failure.
  static constexpr const char* kNoFailure = "-";
  static constexpr const char* kFirstBeat = "a 0 {}";

  /// Starts the thread, which keeps the object until it ends. The end of the returned pointers
  /// leaves without a message to the peers.
  static std::shared_ptr<Liveness> start(LivenessConfig config);
  explicit Liveness(LivenessConfig config); // for start()
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  std::shared_ptr<GroupProgress> add_group(const std::string& name);
  /// Once all its ranks have closed it: heartbeats do not name it any more.
  void remove_group(const std::shared_ptr<GroupProgress>& group);

  /// True from the first failure on. Cheap.
  bool failed() const { return failed_; }
  /// Call it in waiting threads, at least every 100 ms. Fails the world if the store of another
  /// host has not answered for the heartbeat limit, or if rank 0 of this host has been stopped for
  /// that time. The monitoring thread cannot report this while it is stuck in a call to the store.
  /// `group`: the ranks for which this one waits.
  void poll_store(const std::vector<int>& group = {});
  FailureCause cause() const;
  /// Reports a failure to the world. The first report of any rank becomes the cause on all ranks.
  /// Waits at most `limit` for the store's answer. Without an answer `cause` becomes the cause
  /// on this rank.
  void fail(FailureCause cause, std::chrono::milliseconds limit);

  /// Requests a check of the peers and waits, at most `limit`, until a check that began after the
  /// call has ended. Returns whether it has.
  bool look(std::chrono::milliseconds limit);
  /// Why `operation`, the group's `sequence`-th, is not complete: which of `members` have not
  /// entered it, are stopped, or send no heartbeat. From the last check.
  std::string describe_missing(const std::string& group, const std::vector<int>& members,
                               uint64_t sequence, const std::string& operation) const;
  /// Whether a member is in another operation than the one in which this rank waits for values,
  /// or has moved on without it: "rank 1 has all_reduce "x" of …". Empty if there is none. From
  /// the last check.
  std::string describe_other(const GroupProgress& own, const std::vector<int>& members) const;
  /// The first rank that has left the world by close().
  std::optional<int> left_rank() const;
  /// Waits, at most a second, until each peer has left, has ended, is lost, or has read the failure.
  void wait_until_known();
  /// Ranks that have ended, left, sent no heartbeat for the heartbeat limit, or are named in the
  /// cause. Still updated after the failure. [rank]
  std::vector<bool> lost() const;
  /// Writes to the store that this rank leaves, then stops. The end of a peer is not a failure
  /// any more. Blocks at most `limit`.
  void leave(std::chrono::milliseconds limit);
  /// Stops without a message to the peers. Blocks at most `limit`.
  void stop(std::chrono::milliseconds limit);

 private:
  struct Peer {
    bool left = false;
    bool knows_failure = false;
    bool ended = false; // its process on this host has ended
    bool silent = false; // on another host: no heartbeat for the heartbeat limit
    CommClock::time_point stopped{}; // when a signal stopped it; the epoch if it runs
  };

  /// What a peer's heartbeat contains about a group.
  struct Entered {
    uint64_t sequence = 0; // 0: no operation yet
    std::string operation{};
    std::string tensors{};
    uint64_t exchanges = 0;
  };

  void run();
  void loop();
  std::vector<int> neighbours() const;
  std::string beat_text();
  void exchange(const std::string& beat);
  void merge(const std::vector<int>& ranks, const std::vector<std::vector<uint8_t>>& values);
  void store_lost(const std::string& why);
  void wait_for_end(std::chrono::milliseconds limit);
  static Entered entered(const std::string& beat, const std::string& group);

  // The caller holds the mutex.
  void find_stopped();
  void adopt(FailureCause new_cause);
  void report_and_adopt(FailureCause found);

  StorePtr& store() { return config_.store; }
  bool process_is(ProcessState state, int peer) const;
  bool process_ended(int peer) const { return process_is(ProcessState::ended, peer); }
  int pid(int peer) const { return config_.peers[static_cast<size_t>(peer)].pid; }
  /// The rank's number in messages.
  int name(int peer) const { return config_.peers[static_cast<size_t>(peer)].launch_rank; }
  int own_name() const { return name(rank_); }
  /// A text that cannot be parsed becomes the message.
  FailureCause read_cause(const std::string& text) const;
  /// `what` follows "rank r ".
  FailureCause loss(int peer, const std::string& what, std::string fix) const;
  FailureCause death(int peer) const;

  // Set at construction. Only the thread uses the connection to the store, which is in the config.
  LivenessConfig config_;
  const int rank_;
  std::vector<bool> watched_; // [rank] /proc shows whether it is alive
  std::vector<bool> beside_; // [rank] watched, and loopback reaches it: needs no heartbeats

  // Guarded by mutex_, except the atomics.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<BeatWatch> watch_; // set at construction
  CommClock::time_point last_look_ = CommClock::now(); // last check of processes
  std::vector<Peer> peers_; // [rank]
  std::vector<std::shared_ptr<GroupProgress>> groups_;
  std::atomic<bool> failed_{false};
  FailureCause cause_;
  std::optional<FailureCause> report_; // not yet written to the store
  uint64_t looks_wanted_ = 0;
  uint64_t looks_done_ = 0;
  uint64_t beats_ = 0;
  bool in_exchange_ = false;
  bool leaving_ = false;
  bool ended_ = false;
  std::atomic<bool> stopping_{false};
  uint64_t polled_beat_ = 0;
  CommClock::time_point last_poll_ = CommClock::now();
  CommClock::duration silent_for_{};
};

} // namespace hasten::detail
