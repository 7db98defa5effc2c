// What the groups of all back ends share: a group's place in the world, the order of its
// operations, its first error, its time-outs, and exchanges of values through the store. Only a
// back end's communicator moves tensors. GroupCore outlives it while operations run.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "hasten/comm/communicator.h"
#include "meet/world_link.h"

namespace hasten {

/// Made by a back end. Either it or the back end's library keeps the tensors until the operation
/// has ended.
struct Work::State {
  /// If the operation runs on a stream and nobody has waited, makes the stream that was current at
  /// its start wait for it. So an exception frees no tensor that is still in use. Never blocks: an
  /// operation that cannot end ends with its back end.
  virtual ~State() = default;
  virtual void wait() = 0;
  virtual bool done() const noexcept = 0;
  virtual std::chrono::steady_clock::time_point ended() const noexcept = 0;
};

namespace detail {

/// All of these, and then `rest`, which the first wait() runs. Of none: has ended.
Work joined_work(std::vector<Work> all, std::function<void()> rest = nullptr);

/// Adds its lifetime to seconds_waited().
class WaitTime {
 public:
  WaitTime();
  WaitTime(const WaitTime&) = delete;
  WaitTime& operator=(const WaitTime&) = delete;
  ~WaitTime();

 private:
  double before_;
  CommClock::time_point start_ = CommClock::now();
};

/// Why an operation failed.
struct OperationFailure {
  std::string text{};
  ErrorKind kind = ErrorKind::other;
  /// The ranks are in different operations, as the text says: nobody has to look for the cause.
  bool ranks_differ = false;
};

using StoreBytes = std::vector<uint8_t>;
using ValueExchange = std::function<std::optional<std::vector<StoreBytes>>(
    c10d::Store&, const std::atomic<bool>& cancelled)>;

/// For StoreThread::post_until: gives the values of those who take part, of which this is the
/// `rank`-th. Each writes its value. The first reads all of them and writes them as one, so each of the
/// others reads one key. No key remains. The list is empty if it was cancelled.
ValueExchange exchange_values(const std::string& prefix, int rank, int world_size,
                              StoreBytes value);

/// With check_shapes as HASTEN_COMM_CHECK says.
CommunicatorOptions with_environment(CommunicatorOptions options);

class GroupCore : public std::enable_shared_from_this<GroupCore> {
 public:
  /// Counts the group in the world. `of`: its ranks in the world; empty: all ranks. Throws
  /// InputError if another group of the world has its name.
  GroupCore(std::shared_ptr<WorldLink> world_link, const CommunicatorOptions& group,
            std::vector<int> of);

  // Set at construction.
  const std::shared_ptr<WorldLink> link;
  // check_shapes as HASTEN_COMM_CHECK says. The back end's communicator sets `backend` before the
  // first operation.
  CommunicatorOptions options;
  const std::vector<int> members; // [rank] its rank in the world
  const std::string key; // the group's name in the store and in heartbeats
  const int rank;
  const int world_size;

  /// Throws if the group is closed or dead. Otherwise enters the next operation and returns its
  /// sequence number. `tensors` describes the operation's tensors in messages.
  uint64_t enter(const std::string& operation, const std::string& tensors = {});
  /// Enters an operation on `tensors`. If options.check_shapes requires it, the ranks compare the
  /// operation and its tensors, and all throw if they differ.
  uint64_t enter_equal(const std::string& operation, const std::string& tensors);
  /// The comparison of enter_equal().
  void check_equal(const std::string& operation, uint64_t sequence, const std::string& tensors);
  /// Returns every rank's value. [rank] The n-th exchange of a rank meets the n-th of all others.
  /// If they belong to different operations, all ranks throw.
  std::vector<nlohmann::json> exchange(const std::string& operation, uint64_t sequence,
                                       const nlohmann::json& value);
  /// What exchange() does, through the store, among these ranks. [their order]
  std::vector<nlohmann::json> exchange_in_store(const std::string& operation, uint64_t sequence,
                                                const nlohmann::json& value,
                                                const std::vector<int>& among);
  /// What exchange() does if it is set. Set before the first operation.
  std::function<std::vector<nlohmann::json>(const std::string& operation, uint64_t sequence,
                                            const nlohmann::json& value)>
      exchange_by_hosts{};

  /// The operation that it has entered, for TransferArguments::text.
  std::string entered() const { return progress_->operation + '\n' + progress_->tensors; }
  /// Throws if the group is closed or dead.
  void check(const std::string& operation);
  /// For waiting loops, about 20 times a second. Throws once a peer is known to be dead or a
  /// signal has asked the process to stop.
  void poll(const std::string& operation);
  /// Reports `text` to the world as the failure, then throws it.
  [[noreturn]] void fail(const std::string& operation, std::string text, std::string fix,
                         ErrorKind kind = ErrorKind::other);
  /// An operation failed: finds the rank that caused it and throws.
  [[noreturn]] void diagnose(const std::string& operation, uint64_t sequence,
                             const OperationFailure& failure);

  /// Keeps what owns connections to the peers until the world ends. Unless the group has ended by
  /// then, it ends before static destructors run, so that no group outlives main.
  void keep(std::shared_ptr<void> connections);

  /// Communicator::abort.
  void abort(std::string_view reason, ErrorKind kind) noexcept;
  /// Communicator::close. Without `orderly` it does not communicate and takes bounded time.
  void close(bool orderly) noexcept;

  /// An operation that a back end has started.
  class Started;

 private:
  /// Like poll(), but also fails once a peer is known to be in another operation.
  void poll_together(const std::string& operation, uint64_t sequence);
  /// Throws the group's first error. If there is none, makes it from the world's cause.
  [[noreturn]] void raise(const std::string& operation);
  /// Fails unless the texts of `among` are equal.
  void require_equal(const std::string& operation, const std::vector<std::string>& texts,
                     const std::vector<int>& among);
  bool wait_idle();

  const std::vector<int> all_; // ranks of the group
  const std::shared_ptr<GroupProgress> progress_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable idle_; // in_flight_ became 0
  int in_flight_ = 0;
  CommClock::time_point last_completion_ = CommClock::now();
  bool closed_ = false;
  std::vector<std::shared_ptr<void>> connections_;
  /// The first error, without its "[part::function]".
  std::optional<FailureCause> error_;

  // Used by the thread that issues operations.
  std::unordered_set<uint64_t> known_; // hashes of the operations that the group has done
  uint64_t compared_at_ = 0; // sequence number of the last comparison with the peers
  CommClock::time_point compared_{}; // time of the last comparison
  uint64_t apart_at_ = 0; // sequence number at which a peer was last in another operation
  CommClock::time_point together_{}; // last time at which it was not
};

/// A thread of the back end completes it, or a waiting one.
class GroupCore::Started final : public Work::State {
 public:
  /// `sequence`: from enter().
  Started(std::shared_ptr<GroupCore> core, std::string operation, uint64_t sequence);
  void complete(std::optional<OperationFailure> failure);
  /// Moves the operation on in the thread that calls it, at most for that time. Empty: the back end
  /// has threads for that. Set before the handle is passed on.
  std::function<void(std::chrono::milliseconds)> drive{};

  void wait() override;
  bool done() const noexcept override;
  CommClock::time_point ended() const noexcept override;

 private:
  /// Whether it has completed within that time.
  bool wait_for(std::chrono::milliseconds limit);
  bool overdue() const;

  // Set at construction.
  const std::shared_ptr<GroupCore> core_;
  const std::string operation_;
  const uint64_t sequence_;
  const CommClock::time_point submitted_ = CommClock::now();

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool completed_ = false;
  CommClock::time_point completed_at_{};
  std::optional<OperationFailure> failure_;
};

} // namespace detail

} // namespace hasten
