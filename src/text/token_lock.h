// Chooses which of several processes makes a file while the others wait. Private to src/data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace hasten::detail {

/// A lock file, locked by flock(), so the kernel frees the lock if its holder dies. The holder
/// removes the file when it has finished. A process that waited and finds the file gone knows that
/// the work is done or has failed.
class TokenLock {
 public:
  enum class Turn {
    mine, // this process makes the file
    done, // another process held the lock and has finished
    none, // locking is not possible here
  };

  explicit TokenLock(std::filesystem::path path);
  /// Removes the file if this process holds the lock.
  ~TokenLock();
  TokenLock(const TokenLock&) = delete;
  TokenLock& operator=(const TokenLock&) = delete;

  /// Blocks until the turn is decided, without a time limit; the holder's death frees the lock.
  /// While another process holds the lock, calls `waiting` every 50 ms with that process's last
  /// tell(). Throws Interrupted.
  Turn acquire(const std::function<void(int64_t done, int64_t total)>& waiting);
  /// Why acquire() returned none.
  const std::string& problem() const { return problem_; }
  /// Progress for the waiting processes. Never throws.
  void tell(int64_t done, int64_t total);

 private:
  std::filesystem::path path_;
  int file_ = -1;
  bool held_ = false;
  std::string problem_{};
};

} // namespace hasten::detail
