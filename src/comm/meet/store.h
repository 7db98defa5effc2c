// The key-value store in which the ranks meet, used from a thread of its own. A call to the store
// can block for good if the serving process is frozen. So no thread that must respond makes such a
// call itself.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "hasten/base/store_server.h"
#include "hasten/base/world.h"

namespace hasten::detail {

using CommClock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// True if all ranks are certainly on this host.
bool world_on_one_host(const World& world);

/// True if the launcher serves the store, so that it outlives every rank.
bool launcher_serves(const World& world);
/// True if this process serves the store.
bool serves_store(const World& world);

/// The numeric address of the other end of the connection; empty for none.
std::string peer_address(const FileDescriptor& fd);

/// Address of the store of a world without a store_file, unless an agent serves it. A Unix socket
/// if all ranks are on this host, or if master_addr is a loopback address. Throws InputError for
/// an invalid secret.
StoreAddress store_address(const World& world);

/// The server, if this process must serve the store, else null. If the world has a store_file, the
/// system chooses the address. Throws InputError if the server cannot listen.
std::shared_ptr<StoreServer> serve_store(const World& world);

/// Connects to the store of `world`, at `address` or at an agent's. `prefix` begins all keys.
/// Blocks until a server listens, until `deadline` or until `cancelled`. The timeout of the
/// returned store is the time until `deadline`, at least a second.
/// Throws like connect_store().
StorePtr open_store(const World& world, const StoreAddress& address, std::string prefix,
                    CommClock::time_point deadline, const std::atomic<bool>& cancelled);

/// While an object lives, c10d does not print a stack trace for a broken connection. When a run
/// ends early every peer's connection breaks, and exceptions report it. Does nothing if
/// TORCH_CPP_LOG_LEVEL is set. Torch's warnings in other threads are suppressed meanwhile, too.
class QuietStore {
 public:
  QuietStore();
  ~QuietStore();
  QuietStore(const QuietStore&) = delete;
  QuietStore& operator=(const QuietStore&) = delete;
};

/// From now on torch logs no errors, unless TORCH_CPP_LOG_LEVEL is set. For back ends that log what
/// we throw.
void silence_torch();

/// Sleeps between two polls of the store: briefly at first, then up to 5 ms.
class StorePause {
 public:
  void operator()();

 private:
  std::chrono::microseconds next_{50};
};

/// Runs functions on a store, one after the other, in one thread. The thread is never joined:
/// stop() waits for a limited time, and a thread that is stuck in a call keeps the objects that it
/// needs alive.
class StoreThread {
 public:
  using Open = std::function<StorePtr(const std::atomic<bool>& cancelled)>;

  /// Starts a thread, which keeps the object until it ends. It first calls `open`. If that throws,
  /// each call throws the same exception. The end of the returned pointers stops the thread.
  static std::shared_ptr<StoreThread> start(Open open);
  StoreThread() = default; // for start()
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  /// Queues `f(store, cancelled)`. `f` must own the objects that it uses, because the caller may be
  /// gone before it ends. It must return soon after `cancelled` becomes true.
  template <typename T>
  std::future<T> post(std::function<T(c10d::Store&, const std::atomic<bool>&)> f) {
    return post_until<T>([f = std::move(f)](c10d::Store& store, const std::atomic<bool>& cancelled)
                             -> std::optional<T> { return f(store, cancelled); });
  }

  /// Queues `f` repeatedly until it returns a value. Other queued functions run in between, so
  /// waiting for peers here delays nothing.
  template <typename T>
  std::future<T> post_until(
      std::function<std::optional<T>(c10d::Store&, const std::atomic<bool>&)> f) {
    auto poll = std::make_shared<Poll<T>>();
    poll->attempt = std::move(f);
    std::future<T> future = poll->promise.get_future();
    enqueue([this, poll] { poll_once(poll); });
    return future;
  }

  /// Makes the running call, and every later one, end early.
  void cancel() { cancelled_ = true; }
  /// Cancels, frees the store and waits at most `limit` for it.
  void stop(std::chrono::milliseconds limit);

 private:
  template <typename T>
  struct Poll {
    std::function<std::optional<T>(c10d::Store&, const std::atomic<bool>&)> attempt;
    std::promise<T> promise;
    StorePause pause{};
  };

  template <typename T>
  void poll_once(const std::shared_ptr<Poll<T>>& poll) {
    try {
      const QuietStore quiet;
      if (open_error_) {
        std::rethrow_exception(open_error_);
      }
      if (std::optional<T> value = poll->attempt(*store_, cancelled_)) {
        poll->promise.set_value(std::move(*value));
        return;
      }
    } catch (...) {
      poll->promise.set_exception(std::current_exception());
      return;
    }
    poll->pause();
    enqueue([this, poll] { poll_once(poll); });
  }
  void enqueue(std::function<void()> task);
  void run(const Open& open);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::atomic<bool> cancelled_{false};
  bool stopping_ = false;
  bool ended_ = false;
  // Used only by the thread.
  StorePtr store_;
  std::exception_ptr open_error_;
};

} // namespace hasten::detail
