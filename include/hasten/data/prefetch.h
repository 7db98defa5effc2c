// Makes the next batches in a background thread while training uses the current one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "hasten/base/process.h"

namespace hasten {

namespace detail {

/// Starts a thread in which torch uses as many threads as in the caller's.
std::thread start_loader_thread(std::function<void()> body);

} // namespace detail

/// Returns the values of `source` in order. Up to `depth` ≥ 1 values are made in advance.
/// Threading: a background thread calls source() from the constructor on, one call at a time, until
/// it returns nullopt or throws. Call next() from one thread.
/// Memory: depth values. source() should use a random generator of its own. If both threads drew
/// from torch's default generator, the order of the draws would vary.
template <typename Value>
class Prefetcher {
 public:
  using Source = std::function<std::optional<Value>()>;

  Prefetcher(Source source, int64_t depth)
      : source_(std::move(source)),
        depth_(static_cast<size_t>(depth < 1 ? 1 : depth)),
        thread_(detail::start_loader_thread([this] { run(); })) {}
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  /// Waits for a running call of source() and starts no other.
  ~Prefetcher() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    room_.notify_one();
    thread_.join();
  }

  /// Returns the next value, or nullopt at the end. Blocks until it is made. An exception of
  /// source() is rethrown once, after the values before it. Throws Interrupted on Ctrl-C.
  std::optional<Value> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (values_.empty() && !ended_) {
      ready_.wait_for(lock, std::chrono::milliseconds(50));
      throw_if_interrupted();
    }
    if (values_.empty()) {
      if (error_) {
        std::rethrow_exception(std::exchange(error_, nullptr));
      }
      return std::nullopt;
    }
    std::optional<Value> value(std::move(values_.front()));
    values_.pop_front();
    lock.unlock();
    room_.notify_one();
    return value;
  }

 private:
  bool wait_for_room() {
    std::unique_lock<std::mutex> lock(mutex_);
    room_.wait(lock, [this] { return stopped_ || values_.size() < depth_; });
    return !stopped_;
  }

  void run() {
    std::exception_ptr error;
    try {
      while (wait_for_room()) {
        std::optional<Value> value = source_();
        if (!value) {
          break;
        }
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          values_.push_back(std::move(*value));
        }
        ready_.notify_one();
      }
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = error;
      ended_ = true;
    }
    ready_.notify_one();
  }

  Source source_;
  size_t depth_;
  std::mutex mutex_{};
  std::condition_variable ready_{}, room_{};
  std::deque<Value> values_{};
  std::exception_ptr error_{};
  bool ended_ = false;
  bool stopped_ = false;
  std::thread thread_; // last member: it starts immediately
};

} // namespace hasten
