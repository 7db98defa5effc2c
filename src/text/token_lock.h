// Which of several processes makes a file. Private to src/text.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "hasten/base/files.h"
#include "hasten/base/process.h"

namespace hasten::detail {

// Chooses which of several processes makes a file while the others wait. A lock file, locked by
// flock(), so the kernel frees the lock if its holder dies. The holder removes the file when it has
// finished. A process that waited and finds the file gone knows that the work is done or has failed.
class TokenLock {
 public:
  enum class Outcome {
    mine, // this process makes the file
    done, // another process held the lock and has finished
    none, // locking is not possible here
  };

  explicit TokenLock(std::filesystem::path path) : path_(std::move(path)) {}
  TokenLock(const TokenLock&) = delete;
  TokenLock& operator=(const TokenLock&) = delete;
  ~TokenLock() {
    if (held_) {
      ::unlink(path_.c_str());
    }
  }

  // Blocks until the outcome is known, without a time limit. While another process holds the lock,
  // calls `waiting` every 50 ms with that process's last report_progress(). Throws Interrupted.
  Outcome acquire(const std::function<void(int64_t done, int64_t total)>& waiting) {
    for (bool waited = false;;) {
      file_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
      if (file_.get() < 0) {
        problem_ = std::strerror(errno);
        return Outcome::none;
      }
      while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) {
          waited = true;
          std::array<int64_t, 2> progress{};
          if (::pread(file_.get(), progress.data(), sizeof(progress), 0) != sizeof(progress)) {
            progress = {};
          }
          waiting(progress[0], progress[1]);
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          throw_if_interrupted();
        } else if (errno != EINTR) { // this file system has no locks
          problem_ = std::strerror(errno);
          return Outcome::none;
        }
      }
      struct stat status {};
      if (::fstat(file_.get(), &status) == 0 && status.st_nlink > 0) {
        held_ = true;
        return Outcome::mine;
      }
      file_.close();
      if (waited) {
        return Outcome::done;
      }
      // The holder removed the file between open and lock: try again.
    }
  }
  // Why acquire() returned none.
  const std::string& problem() const { return problem_; }

  // Progress for the waiting processes. Never throws.
  void report_progress(int64_t done, int64_t total) {
    const std::array<int64_t, 2> progress{done, total};
    // If the disk is full, the waiting processes only miss a progress report.
    [[maybe_unused]] const ssize_t written =
        held_ ? ::pwrite(file_.get(), progress.data(), sizeof(progress), 0) : 0;
  }

 private:
  std::filesystem::path path_;
  FileDescriptor file_{};
  bool held_ = false;
  std::string problem_{};
};

} // namespace hasten::detail
