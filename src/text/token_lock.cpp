#include "token_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "hasten/base/process.h"

namespace hasten::detail {

TokenLock::TokenLock(std::filesystem::path path) : path_(std::move(path)) {}

TokenLock::~TokenLock() {
  if (held_) {
    ::unlink(path_.c_str());
  }
  if (file_ >= 0) {
    ::close(file_);
  }
}

TokenLock::Turn TokenLock::acquire(const std::function<void(int64_t, int64_t)>& waiting) {
  for (bool waited = false;;) {
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) {
      problem_ = std::strerror(errno);
      return Turn::none;
    }
    while (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        waited = true;
        std::array<int64_t, 2> progress{};
        if (::pread(file_, progress.data(), sizeof(progress), 0) != sizeof(progress)) {
          progress = {};
        }
        waiting(progress[0], progress[1]);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        throw_if_interrupted();
      } else if (errno != EINTR) { // this file system has no locks
        problem_ = std::strerror(errno);
        return Turn::none;
      }
    }
    struct stat status {};
    if (::fstat(file_, &status) == 0 && status.st_nlink > 0) {
      held_ = true;
      return Turn::mine;
    }
    ::close(std::exchange(file_, -1));
    if (waited) {
      return Turn::done;
    }
    // The holder removed the file between open and lock: try again.
  }
}

void TokenLock::tell(int64_t done, int64_t total) {
  const std::array<int64_t, 2> progress{done, total};
  // If the disk is full, the waiting processes only miss a progress report.
  [[maybe_unused]] const ssize_t written =
      held_ ? ::pwrite(file_, progress.data(), sizeof(progress), 0) : 0;
}

} // namespace hasten::detail
