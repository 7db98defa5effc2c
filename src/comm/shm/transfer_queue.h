// The transfers of a group, in their order, and who moves them on: the thread that waits for one,
// else a thread of the queue.
//
// A small transfer is published when it starts. While there is room for what the peers publish, none
// of them depends on this rank from then on, and the transfer ends when somebody looks: wait(), the
// next start, or the thread, if it must end without them (progress_in_thread). So a thread that
// starts a small transfer and waits for it does everything itself. The queue's thread moves larger
// ones, and small ones for which there was no room.
// One thread at a time drives: it moves the transfers on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stages.h"
#include "transfer.h"

namespace hasten::detail {

/// The ranks of a group are in different operations: "rank 1 has …, rank 0 has …".
class RanksDiffer : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class TransferQueue {
 public:
  /// A transfer from its start to its end.
  struct Item {
    Item(TransferArguments arguments, int rank, int world_size, SharedPlaces& places)
        : transfer(std::move(arguments), rank, world_size, places) {}
    Transfer transfer;
    /// Calls `f` once it has ended, in the thread that ends it, with an exception if it failed. `f`
    /// must not throw.
    void on_end(std::function<void(std::exception_ptr)> f);
    /// Why it failed, null if it did not. Empty before its end. Known before on_end()'s calls come,
    /// so that they and those who wait for them find it ended.
    std::optional<std::exception_ptr> outcome() const;
    /// Whether on_end()'s calls have come.
    bool has_ended() const { return ended.load(std::memory_order_acquire); }

    // Used by the queue.
    uint32_t first = 0; // its first stage
    uint32_t published = 0;
    uint32_t consumed = 0;
    std::atomic<bool> ended{false};
    mutable std::mutex mutex; // guards the members below
    std::optional<std::exception_ptr> why{};
    std::vector<std::function<void(std::exception_ptr)>> then{};
  };

  /// `names`: the ranks in messages. `memory`: see Stages; it lives while `owner` does.
  TransferQueue(int rank, const std::vector<char*>& memory, std::vector<int> names,
                std::shared_ptr<void> owner = nullptr);
  /// stop().
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(names_.size()); }

  std::shared_ptr<Item> start(TransferArguments arguments);
  /// Moves transfers on in this thread until `item` has ended or `limit` has passed.
  void drive(const Item& item, std::chrono::milliseconds limit);
  /// From now on the transfers that have started end without anybody who waits.
  void progress_in_thread();
  /// Ends the thread, and every transfer that has not ended or starts later with an exception.
  void stop() noexcept;
  /// start() calls it, so that a test sees who called start().
  static inline void (*at_start)() = nullptr;

 private:
  void run();
  // The functions of the thread that drives.
  /// Takes the new transfers and moves on what can be without waiting; with `all`, also transfers
  /// that are not small.
  void progress(bool all);
  bool advance_all(bool all);
  bool advance(Item& item, bool first);
  bool publish_stage(Item& item);
  bool consume_stage(Item& item);
  Transfer::Payloads payloads(uint32_t stage) const;
  void require_equal(const Item& item) const;
  void end_first();
  void stop_driving();
  /// Whether a peer may wait for what this rank does next.
  bool peers_wait() const;
  // With the mutex.
  bool needs_thread() const;

  const std::shared_ptr<void> owner_;
  const int rank_;
  const std::vector<int> names_;
  SharedPlaces places_; // of the thread that drives
  Stages stages_;
  const int spins_;

  std::mutex mutex_; // guards the members up to the next empty line
  std::condition_variable changed_; // for those who wait
  std::condition_variable wanted_; // for the thread
  std::deque<std::shared_ptr<Item>> new_;
  bool driven_ = false; // whether a thread moves transfers on
  bool unfinished_ = false; // when a thread stopped driving: queue_ needs the queue's thread
  bool progress_in_thread_ = false;
  int waiters_ = 0;
  bool stopping_ = false;

  // Of the thread that drives.
  std::deque<std::shared_ptr<Item>> queue_;
  Stages::Blocked blocked_{};
  std::exception_ptr error_; // for all transfers from now on

  std::thread thread_;
};

/// Returns what all ranks gave. [rank]
using ExchangeJson = std::function<std::vector<nlohmann::json>(const nlohmann::json&)>;

/// Queues of a group whose ranks share memory. Collective, by two exchanges. `names`: the ranks in
/// messages. Throws Error with the reason, on all ranks, if one cannot share its memory.
std::vector<std::shared_ptr<TransferQueue>> share_memory(int rank, const std::vector<int>& names,
                                                         const ExchangeJson& exchange,
                                                         size_t queues = 1);

} // namespace hasten::detail
