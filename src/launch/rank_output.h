// Where what the ranks write goes: files, or through this process with a prefix.
// Internal to launch.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hasten/launch/launch.h"

namespace hasten::detail {

/// Threading: one thread of its own copies what is teed; all else is the caller's.
class RankOutput {
 public:
  /// Makes folders, files and pipes. Throws InputError that names the path.
  explicit RankOutput(const LaunchOptions& options);
  /// Removes the error files that are in no log_dir.
  ~RankOutput();
  RankOutput(const RankOutput&) = delete;
  RankOutput& operator=(const RankOutput&) = delete;

  /// Descriptor for the rank's stdout (1) or stderr (2); -1: it inherits ours.
  int descriptor(int rank, int stream) const;
  /// Where the rank is told to record its error.
  std::filesystem::path error_file(int rank) const;
  /// All ranks have been started: their ends of pipes and files are closed here, and
  /// copying begins. Signals must be blocked.
  void start();
  /// All ranks have ended: asks for what is left in the pipes.
  void drain();
  /// True once everything has been written; waits for that up to `limit`.
  bool drained(std::chrono::milliseconds limit);
  /// The last lines of the rank's stderr where it went into a file alone, else "".
  std::string stderr_tail(int rank) const;

 private:
  struct Shared;
  void open_rank(int rank);
  void close_descriptors() noexcept;
  void close_all() noexcept;
  std::filesystem::path folder(int rank) const;
  std::filesystem::path log_file(int rank, int stream) const;

  LogsSpecs logs_;
  std::filesystem::path temporary_{}; // of error files, where there is no log_dir
  int temporary_lock_ = -1;
  std::vector<std::array<int, 2>> descriptors_{}; // [rank][stream - 1]
  std::shared_ptr<Shared> shared_; // outlives this where a console is stuck
};

/// `text` with ${rank}, ${local_rank} and ${role_name}, or without the braces,
/// replaced; "$$" is a dollar sign.
std::string log_line_prefix(const std::string& text, int rank);

} // namespace hasten::detail
