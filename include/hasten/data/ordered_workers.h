// Makes values in several background threads and returns them in order.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hasten/base/process.h"

namespace hasten {

namespace detail {

/// Starts a thread in which torch uses `torch_threads` threads; 0: as many as in the caller's.
std::thread start_worker_thread(std::function<void()> body, int torch_threads);

} // namespace detail

/// Returns make(0), make(1), … make(count - 1), in that order. Ends earlier if make() returns
/// nullopt. `workers` ≥ 1 threads make the values; fewer if the system has no more threads or
/// `count` needs no more. At most `depth` ≥ 1 values are being made or waiting. Which thread makes a
/// value varies; the values and their order do not.
/// Threading: make() runs in several threads at the same time, from the constructor on. Call next()
/// from one thread. Torch uses `torch_threads` threads in each worker (0: as many as in the
/// caller's), because there may be as many workers as cores.
/// Memory: depth values.
template <typename Value>
class OrderedWorkers {
 public:
  using Make = std::function<std::optional<Value>(int64_t)>;

  OrderedWorkers(Make make, int64_t count, int workers, int64_t depth, int torch_threads = 1)
      : make_(std::move(make)),
        count_(count),
        slots_(static_cast<size_t>(std::clamp<int64_t>(depth, 1, std::max<int64_t>(count, 1)))) {
    const int64_t threads = std::clamp<int64_t>(workers, 1, std::max<int64_t>(count, 1));
    try {
      while (std::ssize(threads_) < threads) {
        threads_.push_back(detail::start_worker_thread([this] { run(); }, torch_threads));
      }
    } catch (const std::system_error&) { // the threads that have started are enough
      if (threads_.empty()) {
        throw;
      }
    }
  }
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;
  /// Waits for running calls of make() and starts no others.
  ~OrderedWorkers() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      count_ = 0;
    }
    room_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  /// Returns the next value, or nullopt at the end. Blocks until it is made. Rethrows an exception
  /// of make() in place of its value; after that there are no more values. Throws Interrupted on
  /// Ctrl-C.
  std::optional<Value> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    Slot& slot = slots_[static_cast<size_t>(taken_) % slots_.size()];
    while (taken_ < count_ && !slot.value && !slot.error) {
      ready_.wait_for(lock, std::chrono::milliseconds(50));
      throw_if_interrupted();
    }
    if (taken_ >= count_) {
      return std::nullopt;
    }
    if (slot.error) {
      count_ = taken_;
      std::rethrow_exception(std::exchange(slot.error, nullptr));
    }
    std::optional<Value> value(std::exchange(slot.value, std::nullopt));
    ++taken_;
    lock.unlock();
    room_.notify_one();
    return value;
  }

 private:
  struct Slot {
    std::optional<Value> value{};
    std::exception_ptr error{};
  };

  // Returns the index of the next value to make, or -1 if there is none.
  int64_t claim() {
    std::unique_lock<std::mutex> lock(mutex_);
    room_.wait(lock,
               [this] { return claimed_ >= count_ || claimed_ - taken_ < std::ssize(slots_); });
    return claimed_ >= count_ ? -1 : claimed_++;
  }

  void run() {
    for (int64_t i = claim(); i >= 0; i = claim()) {
      Slot made;
      try {
        made.value = make_(i);
      } catch (...) {
        made.error = std::current_exception();
      }
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!made.value) { // no values follow
          count_ = std::min(count_, made.error ? i + 1 : i);
        }
        slots_[static_cast<size_t>(i) % slots_.size()] = std::move(made);
      }
      ready_.notify_one();
    }
    room_.notify_one(); // another worker may wait for the same end
  }

  Make make_;
  int64_t count_; // decreases when an end or an error is known
  std::mutex mutex_{};
  std::condition_variable ready_{}, room_{};
  std::vector<Slot> slots_; // [index of the value % depth]
  int64_t claimed_ = 0; // values that a worker has started to make
  int64_t taken_ = 0; // values that next() has returned
  std::vector<std::thread> threads_{}; // last member: the threads start immediately
};

} // namespace hasten
