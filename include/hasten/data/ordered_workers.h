// Values made ahead by several background threads and handed out in order.
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

/// A thread in which torch uses one thread.
std::thread start_worker_thread(std::function<void()> body);

} // namespace detail

/// make(0), make(1), ... make(count - 1), in that order, made by `workers` >= 1
/// threads (by fewer where the system has no more, or count needs no more), of which
/// up to `depth` >= 1 are under way or waiting. Which thread makes
/// which value depends on chance, the values and their order do not.
/// Threading: make runs in several threads at once, from the constructor on; next()
/// is for one thread. Torch uses one thread in each worker.
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
    } catch (const std::system_error&) { // no more threads: fewer do
      if (threads_.empty()) {
        throw;
      }
    }
  }
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;
  /// Waits for the calls of make under way, and makes no other.
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

  /// The next value; nothing at the end. Blocks until it is there. What make threw
  /// is thrown here, at its value's turn; that is the end. Throws Interrupted on
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

  // The number of the next value to make; count_ where there is none.
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
  std::vector<Slot> slots_; // [number of the value % depth]
  int64_t claimed_ = 0; // values that a worker has begun
  int64_t taken_ = 0; // values handed out
  bool stopped_ = false;
  std::vector<std::thread> threads_{}; // last: they start at once
};

} // namespace hasten
