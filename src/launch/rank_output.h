// Where the ranks' output goes: to files, or through this process with a prefix. Internal to
// launch.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hasten/base/files.h"
#include "hasten/launch/launch.h"

namespace hasten::detail {

/// A temporary folder of this launcher, which the destructor removes. If this process is killed, the
/// next launcher removes it.
struct LaunchFolder {
  LaunchFolder() = default;
  LaunchFolder(LaunchFolder&&) = delete;
  ~LaunchFolder();
  void create();

  std::filesystem::path path{}; // empty: it could not be created
  FileDescriptor lock{}; // while this process lives
};

/// Threading: its own thread copies teed streams. One thread calls the functions.
class RankOutput {
 public:
  /// Creates folders, files and pipes for the ranks of this host. Functions number them from 0; files
  /// and prefixes have the ranks of the world, which begin with `first_rank`. Throws InputError that
  /// names the path.
  RankOutput(const LaunchOptions& options, int first_rank);

  /// Descriptor for the rank's stdout (1) or stderr (2). -1: it inherits this process's.
  int descriptor(int rank, int stream) const;
  /// The file in which the rank must record its error.
  std::filesystem::path error_file(int rank) const;
  /// Call it after all ranks have been started. Closes their ends of pipes and files and starts
  /// copying. Signals must be blocked.
  void start();
  /// Call it after all ranks have ended. Copies what is left in the pipes.
  void drain();
  /// True once everything has been written. Waits up to `limit`.
  bool drained(std::chrono::milliseconds limit);
  /// The last lines of the rank's stderr if it was written only to a file, else empty.
  std::string stderr_tail(int rank) const;

 private:
  struct Shared;
  void open_rank(int rank);
  std::filesystem::path folder(int rank) const;
  std::filesystem::path log_file(int rank, int stream) const;

  LogsSpecs logs_;
  const int first_rank_;
  // Of error files if there is no log_dir. Without it only the order in which ranks end shows the
  // first failure.
  LaunchFolder temporary_{};
  std::vector<std::array<FileDescriptor, 2>> descriptors_{}; // [rank][stream - 1]
  std::shared_ptr<Shared> shared_; // outlives this object if a console is stuck
};

/// Replaces ${rank}, ${local_rank} and ${role_name} in `text`, also without the braces. "$$" is a
/// dollar sign.
std::string log_line_prefix(const std::string& text, int rank, int local_rank);

} // namespace hasten::detail
