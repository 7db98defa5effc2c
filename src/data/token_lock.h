// Who makes a file that several processes want: one does, the others wait.
// Private to src/data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace hasten::detail {

/// A lock file, held by flock(), so that the kernel frees it when its holder dies.
/// Whoever is through removes the file: one that waited for a lock file that is
/// gone knows that the work is done, or has failed.
class TokenLock {
 public:
  enum class Turn {
    mine, // make it
    done, // another process held the lock and is through
    none, // there can be no lock here
  };

  explicit TokenLock(std::filesystem::path path);
  /// Removes the file where the lock is held.
  ~TokenLock();
  TokenLock(const TokenLock&) = delete;
  TokenLock& operator=(const TokenLock&) = delete;

  /// Blocks until it is clear whose turn it is, without a limit: the holder's
  /// death ends it. While another process holds the lock `waiting` is called
  /// every 50 ms with what that process last gave to tell(). Throws Interrupted.
  Turn acquire(const std::function<void(int64_t done, int64_t total)>& waiting);
  /// Why acquire() answered none.
  const std::string& problem() const { return problem_; }
  /// For those that wait. Never throws.
  void tell(int64_t done, int64_t total);

 private:
  bool lock(const std::function<void(int64_t, int64_t)>& waiting);

  std::filesystem::path path_;
  int file_ = -1;
  bool held_ = false;
  bool waited_ = false;
  std::string problem_{};
};

} // namespace hasten::detail
