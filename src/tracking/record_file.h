// A file to which a thread appends records.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <filesystem>
#include <mutex>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"

namespace hasten::detail {

/// Threading: one thread calls it.
class RecordFile {
 public:
  /// Makes the folder and opens the file, at its end. Throws as throw_file_error() does.
  RecordFile(const char* where, std::filesystem::path path)
      : where_(where), path_(std::move(path)) {
    std::error_code error;
    std::filesystem::create_directories(folder_of(path_), error);
    file_ = FileDescriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!file_) {
      throw_file_error(where_, path_, errno);
    }
    sigset_t all, old;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &old); // other threads handle signals
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  /// Waits while the queue is full, up to ten seconds. Throws the error of an earlier write. Does
  /// nothing for an empty record and after finish().
  void add(std::string record) {
    std::unique_lock lock(mutex_);
    const bool accepts = changed_.wait_for(lock, std::chrono::seconds(10), [this] {
      return error_ != 0 || queue_.size() < kQueueRecords;
    });
    if (error_ != 0) {
      throw_file_error(where_, path_, error_);
    }
    if (!accepts) {
      throw Error(where_, path_.string() + ": the disk has accepted no record for 10 s");
    }
    if (thread_.joinable() && !record.empty()) {
      queue_.push_back(std::move(record));
      changed_.notify_all();
    }
  }
  /// Returns when all records are written, and closes the file. Throws the error of a write. A
  /// second call does nothing.
  void finish() {
    thread_ = {}; // stops and joins
    const int error = std::exchange(error_, 0), close_error = file_.close();
    if (error != 0 || close_error != 0) {
      throw_file_error(where_, path_, error != 0 ? error : close_error);
    }
  }

 private:
  static constexpr size_t kQueueRecords = 1024;

  /// Ends when the queue is empty and a stop is requested, or at a failed write.
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (error_ == 0 && changed_.wait(lock, stop, [this] { return !queue_.empty(); })) {
      const std::string record = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      const int error = write(record);
      lock.lock();
      error_ = error;
      changed_.notify_all();
    }
  }
  /// 0, or errno.
  int write(const std::string& record) const {
    const int error = write_all(file_.get(), record);
    struct stat status {};
    const bool removed = ::fstat(file_.get(), &status) == 0 && status.st_nlink == 0;
    return error == 0 && removed ? ENOENT : error;
  }

  const char* where_;
  const std::filesystem::path path_;
  FileDescriptor file_{};
  std::mutex mutex_{};
  std::condition_variable_any changed_{};
  std::deque<std::string> queue_{}; // under mutex_
  int error_ = 0; // errno of a write; under mutex_
  std::jthread thread_{}; // last: its end uses the others
};

} // namespace hasten::detail
