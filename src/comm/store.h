// The key-value store the ranks meet in, behind a thread of its own: a store
// call can block for good when the process that serves it is frozen, so no
// thread that must answer ever makes one itself.
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

/// True where all ranks are certainly on this host.
bool world_on_one_host(const World& world);

/// True where the launcher serves the store, so that it outlives every rank.
bool launcher_serves(const World& world);
/// True where this process serves the store.
bool serves_store(const World& world);

/// The address at the other end of the connection `fd`, which it closes, as digits; empty
/// for -1.
std::string peer_address(int fd);

/// Where the store of a world without a store_file is, unless an agent serves it: a Unix
/// socket where all ranks are on this host, which a loopback master_addr says too. Throws
/// InputError for a secret that cannot be used.
StoreAddress store_address(const World& world);

/// The server, where this process is to be it; at an address that the system chooses
/// where the world has a store_file. Throws InputError where it cannot listen.
std::shared_ptr<StoreServer> serve_store(const World& world);

/// A connection to the store of `world`, at `address` or at an agent's; connects as soon
/// as somebody listens. `generation` counts the worlds this process has joined: a
/// launcher's store keeps the keys of earlier ones.
/// Blocks until then, until `deadline` or until `cancelled`. The store's own
/// timeout is the time until `deadline`, at least a second.
/// Throws as connect_store().
StorePtr open_store(const World& world, const StoreAddress& address, int generation,
                    CommClock::time_point deadline, const std::atomic<bool>& cancelled);

/// While one lives, c10d does not print a stack for a connection that breaks:
/// it breaks for every peer when a run ends early, and is reported by an
/// exception. Does nothing where TORCH_CPP_LOG_LEVEL is set. Costs other
/// threads the warnings of torch that fall into the call.
class QuietStore {
 public:
  QuietStore();
  ~QuietStore();
  QuietStore(const QuietStore&) = delete;
  QuietStore& operator=(const QuietStore&) = delete;
};

/// While one lives, this thread looks names up in /etc/hosts alone. c10d asks
/// for the name of every address it connects to, for its messages; name
/// servers that do not answer would hold up each connection for 5 s or more.
class NoNameServers {
 public:
  NoNameServers();
  ~NoNameServers();
  NoNameServers(const NoNameServers&) = delete;
  NoNameServers& operator=(const NoNameServers&) = delete;

 private:
  int count_ = 0;
};

/// Sleeps between two looks at the store: short at first, up to 5 ms.
class StorePause {
 public:
  void operator()();

 private:
  std::chrono::microseconds next_{50};
};

/// Runs functions on a store, one after the other, in one thread. The thread
/// is never joined: stop() waits for it a bounded time, and one that is stuck
/// in a call keeps what it needs alive by itself.
class StoreThread {
 public:
  using Open = std::function<StorePtr(const std::atomic<bool>& cancelled)>;

  /// The thread starts with `open`; where that throws each call throws it too.
  explicit StoreThread(Open open);
  ~StoreThread();
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  /// Queues `f(store, cancelled)`. `f` owns what it touches: the caller may be
  /// gone before it ends. It returns soon after `cancelled` becomes true.
  template <typename T>
  std::future<T> post(std::function<T(c10d::Store&, const std::atomic<bool>&)> f) {
    return post_until<T>([f = std::move(f)](c10d::Store& store, const std::atomic<bool>& cancelled)
                             -> std::optional<T> { return f(store, cancelled); });
  }

  /// Queues `f` again and again until it returns a value; what else is queued has its
  /// turn in between, so that waiting for peers here holds up nothing.
  template <typename T>
  std::future<T> post_until(
      std::function<std::optional<T>(c10d::Store&, const std::atomic<bool>&)> f) {
    auto poll = std::make_shared<Poll<T>>();
    poll->attempt = std::move(f);
    std::future<T> future = poll->promise.get_future();
    enqueue(shared_.get(), [shared = shared_.get(), poll] { poll_once(shared, poll); });
    return future;
  }

  /// Lets the call in progress, and every later one, end early.
  void cancel();
  /// Cancels, lets go of the store and waits at most `limit` for that.
  void stop(std::chrono::milliseconds limit);

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    std::atomic<bool> cancelled{false};
    bool stopping = false;
    bool ended = false;
    StorePtr store; // used by the thread alone
    std::exception_ptr open_error; // used by the thread alone
  };
  template <typename T>
  struct Poll {
    std::function<std::optional<T>(c10d::Store&, const std::atomic<bool>&)> attempt;
    std::promise<T> promise;
    StorePause pause{};
  };

  template <typename T>
  static void poll_once(Shared* shared, const std::shared_ptr<Poll<T>>& poll) {
    try {
      const QuietStore quiet;
      if (shared->open_error) {
        std::rethrow_exception(shared->open_error);
      }
      if (std::optional<T> value = poll->attempt(*shared->store, shared->cancelled)) {
        poll->promise.set_value(std::move(*value));
        return;
      }
    } catch (...) {
      poll->promise.set_exception(std::current_exception());
      return;
    }
    poll->pause();
    enqueue(shared, [shared, poll] { poll_once(shared, poll); });
  }
  static void enqueue(Shared* shared, std::function<void()> task);
  static void run(const std::shared_ptr<Shared>& shared, const Open& open);

  std::shared_ptr<Shared> shared_;
};

} // namespace hasten::detail
