// Starts the ranks of a world on this host and ends them together.
// Ranks inherit stdout and stderr, unless LogsSpecs says otherwise. What one
// write(2) carries is never torn (log lines of hasten are one write each); a
// program that writes its results through a buffered stream should write them on
// rank 0 alone, or be launched with `tee`. Rank 0 inherits stdin unless that is a
// terminal; the others read nothing.
// Threading: blocks the calling thread, which should be the program's only one:
// signals that another thread takes are not forwarded.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/process.h"
#include "hasten/base/timeouts.h"

namespace hasten {

/// Standard streams, with torchrun's numbers.
enum class Std { none = 0, out = 1, err = 2, all = 3 };

/// Which standard streams of which ranks.
struct RankStreams {
  /// Of ranks that are not in `ranks`.
  Std others = Std::none;
  std::map<int, Std> ranks{};

  bool has(int rank, Std stream) const;
  bool any() const;
};
/// torchrun's notation: "3" is both streams of every rank, "1" stdout, "2" stderr,
/// "0" none; "0:3,2:1" both of rank 0, stdout of rank 2, and none of the others.
/// Throws InputError for anything else.
RankStreams parse_rank_streams(const std::string& text);

/// Where the output of the ranks goes. torchrun's words.
struct LogsSpecs {
  /// Folder that receives RANK/stdout.log and RANK/stderr.log, made where it does
  /// not exist; files that are there are appended to. Empty (default): no files.
  /// Where neither `redirects` nor `tee` names a stream, all of them are teed.
  std::filesystem::path log_dir{};
  /// Streams that go into their file alone. Needs log_dir. Default: none.
  RankStreams redirects{};
  /// Streams that come to this process's own line by line, each after a prefix, and
  /// into their file where there is log_dir. Costs a thread and a copy; the rank
  /// sees a pipe, no terminal. Default: none.
  RankStreams tee{};
  /// The prefix, in which ${rank}, ${local_rank} and ${role_name} are replaced.
  std::string log_line_prefix_template = "[rank${rank}]: ";

  bool any() const { return !log_dir.empty() || redirects.any() || tee.any(); }
};

struct LaunchOptions {
  /// Ranks to start, ≥ 1.
  int nproc = 1;
  /// Program (searched in PATH when it has no slash) and its arguments.
  std::vector<std::string> argv{};
  /// Added to, or replacing, what the ranks get otherwise.
  std::vector<std::pair<std::string, std::string>> environment{};
  /// Ranks that go on without one that is lost (LocalSGDOptions::on_peer_failure)
  /// are let: only rank 0's failure ends the others, and its end alone is how the
  /// launch ended. The others' failures are logged.
  bool keep_going = false;
  LogsSpecs logs{};
  /// A rank that a signal has stopped (SIGSTOP) for most of this time, and nobody has
  /// let go on, counts as failed and is killed. One that a debugger holds does not
  /// count, nor does a stop of the launcher itself (Ctrl-Z). Milliseconds.
  std::chrono::milliseconds heartbeat_timeout = default_heartbeat_timeout();
  /// How long the other ranks may go on after one has failed, so that they can
  /// say what they saw of it. Then SIGTERM. Milliseconds.
  std::chrono::milliseconds settle{3'000};
  /// From that SIGTERM to SIGKILL. Milliseconds.
  std::chrono::milliseconds grace{5'000};
  /// From a forwarded SIGINT, SIGTERM or SIGHUP to SIGKILL: time to finish a step
  /// and save. A second signal shortens it to one second. Milliseconds.
  std::chrono::milliseconds interrupt_grace{30'000};
};

struct LaunchResult {
  /// 0 if all ranks ended well; 128 + n if the launcher was stopped by signal n;
  /// else the code of the rank that failed first, 128 + n if a signal n killed it,
  /// 1 if it froze.
  int exit_code = 0;
  /// The rank that failed first, -1 if none did before the launcher was stopped.
  /// Where ranks record their errors (recorded_error.h) that is the one with the
  /// earliest error that is not of a peer; else the one that ended first. A rank
  /// that took longer to end than those it took down is found by that.
  int first_failed_rank = -1;
  /// Why it did not end well: "rank 1 exited with code 3 first", "rank 0 froze first",
  /// "stopped by signal 2 (Interrupt)"; empty for exit code 0.
  std::string reason{};
  /// What that rank recorded of it; else the last lines of its stderr where that
  /// went into a file alone; else empty.
  std::string message{};
  /// True where that rank has shown the message itself.
  bool shown = false;
  /// The others that failed, which are likely to follow from it, in the order in
  /// which they did: "rank 0 exited with code 1"; [rank]
  std::vector<std::string> consequences{};
  /// How each rank ended. [rank]
  std::vector<ProcessEnd> ends{};
};

/// Starts `nproc` processes with torchrun's variables (RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK,
/// ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_ERROR_FILE) and
/// OMP_NUM_THREADS as threads_per_rank() says; a warning where that is more than
/// the cores (affinity and cgroup quota). This process serves the store in which the ranks
/// meet, at a Unix socket for its own user and root (HASTEN_STORE_SOCKET), in a thread of
/// its own that takes no signals; MASTER_PORT is a port that was free. Each rank leads a process group of its own, which is killed when
/// the rank ends; ranks die with this process whatever kills it.
/// SIGINT and SIGTERM are forwarded, SIGHUP too unless it is ignored (nohup);
/// SIGTSTP (Ctrl-Z) stops the ranks and the launcher until it is continued.
/// Blocks until every rank has ended.
/// Throws InputError for nproc < 1, an empty argv, a program that cannot be
/// started, logs that cannot be written or name a rank there is not, and inside a
/// world larger than one; no rank is left then.
LaunchResult launch(const LaunchOptions& options);

/// Removes the temporary folders that this user's killed launchers left. launch() does so
/// where it makes one.
void remove_folders_of_killed_launchers();

} // namespace hasten
