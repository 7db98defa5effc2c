#include "record_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"

namespace hasten::detail {

constexpr size_t kQueueRecords = 1024;
constexpr std::chrono::seconds kQueueWait{10};

static int open_record_file(const char* where, const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(folder_of(path), error);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) {
    throw_file_error(where, path, errno);
  }
  return file;
}

RecordFile::RecordFile(const char* where, std::filesystem::path path)
    : where_(where), path_(std::move(path)), file_(open_record_file(where, path_)) {
  sigset_t all, old;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &old); // other threads handle signals
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

int RecordFile::write(const std::string& record) const {
  const int error = write_all(file_.get(), record);
  struct stat status {};
  if (error == 0 && ::fstat(file_.get(), &status) == 0 && status.st_nlink == 0) {
    return ENOENT; // someone has removed the file
  }
  return error;
}

void RecordFile::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    // It stays in the queue until it is written, so an empty queue means that all is written.
    const std::string& record = queue_.front(); // deque: push_back() does not move it
    lock.unlock();
    const int error = write(record);
    lock.lock();
    queue_.pop_front();
    if (error != 0) {
      error_ = error;
      queue_.clear();
      ends_ = true;
    }
    changed_.notify_all();
  }
}

void RecordFile::add(std::string record) {
  std::unique_lock lock(mutex_);
  const bool room =
      changed_.wait_for(lock, kQueueWait, [this] { return queue_.size() < kQueueRecords; });
  if (error_ != 0) {
    throw_file_error(where_, path_, error_);
  }
  if (!room) {
    throw Error(where_, path_.string() + ": the disk has accepted no record for 10 s");
  }
  if (!ends_ && !record.empty()) {
    queue_.push_back(std::move(record));
    changed_.notify_all();
  }
}

void RecordFile::stop() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
}

void RecordFile::finish() {
  stop();
  const int error = std::exchange(error_, 0);
  const int close_error = file_.close();
  if (error != 0 || close_error != 0) {
    throw_file_error(where_, path_, error != 0 ? error : close_error);
  }
}

} // namespace hasten::detail
