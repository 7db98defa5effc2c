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

/// Starts a thread in which torch uses one thread.
std::thread start_worker_thread(std::function<void()> body);

} // namespace detail

/// Returns make(0), make(1), … make(count - 1), in that order. `workers` ≥ 1 threads make them;
/// fewer if the system has no more threads or `count` needs no more. At most `depth` ≥ 1 values are
/// being made or waiting. Which thread makes a value varies; the values and their order do not.
/// Threading: make() runs in several threads at the same time, from the constructor on. Call next()
/// from one thread. Torch uses one thread in each worker.
/// Memory: depth values.
template <typename Value>
class OrderedWorkers {
 public:
  using Make = std::function<Value(int64_t)>;

  OrderedWorkers(Make make, int64_t count, int workers, int64_t depth)
      : make_(std::move(make)),
        count_(count),
        slots_(static_cast<size_t>(std::clamp<int64_t>(depth, 1, count + 1))) {
    const int64_t threads = std::clamp<int64_t>(workers, 1, count + 1);
    try {
      while (std::ssize(threads_) < threads) {
        threads_.push_back(detail::start_worker_thread([this] { run(); }));
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
      stopped_ = true;
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
    if (taken_ == count_) {
      return std::nullopt;
    }
    Slot& slot = slots_[static_cast<size_t>(taken_) % slots_.size()];
    while (!slot.value && !slot.error) {
      ready_.wait_for(lock, std::chrono::milliseconds(50));
      throw_if_interrupted();
    }
    if (slot.error) {
      taken_ = count_;
      stopped_ = true;
      room_.notify_all();
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

  // Returns the index of the next value to make, or count_ if there is none.
  int64_t claim() {
    std::unique_lock<std::mutex> lock(mutex_);
    room_.wait(lock, [this] {
      return stopped_ || claimed_ == count_ ||
             claimed_ < taken_ + static_cast<int64_t>(slots_.size());
    });
    return stopped_ || claimed_ == count_ ? count_ : claimed_++;
  }

  void run() {
    for (int64_t i = claim(); i < count_; i = claim()) {
      Slot made;
      try {
        made.value.emplace(make_(i));
      } catch (...) {
        made.error = std::current_exception();
      }
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        slots_[static_cast<size_t>(i) % slots_.size()] = std::move(made);
      }
      ready_.notify_one();
    }
    room_.notify_one(); // another worker may wait for the same end
  }

  Make make_;
  int64_t count_;
  std::mutex mutex_{};
  std::condition_variable ready_{}, room_{};
  std::vector<Slot> slots_; // [index of the value % depth]
  int64_t claimed_ = 0; // values that a worker has started to make
  int64_t taken_ = 0; // values that next() has returned
  bool stopped_ = false;
  std::vector<std::thread> threads_{}; // last member: the threads start immediately
};

} // namespace hasten
