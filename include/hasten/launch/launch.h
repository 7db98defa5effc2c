// Starts the ranks of a world on this host and ends them together.
// Ranks inherit stdout and stderr. What one write(2) carries is never torn (log
// lines of hasten are one write each); a program that writes its results through
// a buffered stream should write them on rank 0 alone. Rank 0 inherits stdin
// unless that is a terminal; the others read nothing.
// Threading: blocks the calling thread, which should be the program's only one:
// signals that another thread takes are not forwarded.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/process.h"

namespace hasten {

struct LaunchOptions {
  /// Ranks to start, ≥ 1.
  int nproc = 1;
  /// Program (searched in PATH when it has no slash) and its arguments.
  std::vector<std::string> argv{};
  /// Added to, or replacing, what the ranks get otherwise.
  std::vector<std::pair<std::string, std::string>> environment{};
  /// Ranks that go on without one that is lost (LocalSgdOptions::on_peer_failure)
  /// are let: only rank 0's failure ends the others, and its end alone is how the
  /// launch ended. The others' failures are logged.
  bool keep_going = false;
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
  /// else the code of the rank that failed first, 128 + n if a signal n killed it.
  int exit_code = 0;
  /// The rank that failed first, -1 if none did before the launcher was stopped.
  int first_failed_rank = -1;
  /// Why it did not end well: "rank 1 exited with code 3 first",
  /// "stopped by signal 2 (Interrupt)"; empty for exit code 0.
  std::string reason{};
  /// How each rank ended. [rank]
  std::vector<ProcessEnd> ends{};
};

/// Starts `nproc` processes with torchrun's variables (RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK,
/// ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and OMP_NUM_THREADS as
/// threads_per_rank() says. The rendezvous is bound to loopback here and its
/// descriptor handed to rank 0 (HASTEN_LISTEN_FD), so no port can be taken
/// meanwhile. Each rank leads a process group of its own, which is killed when
/// the rank ends; ranks die with this process whatever kills it.
/// SIGINT and SIGTERM are forwarded, SIGHUP too unless it is ignored (nohup);
/// SIGTSTP (Ctrl-Z) stops the ranks and the launcher until it is continued.
/// Blocks until every rank has ended.
/// Throws InputError for nproc < 1, an empty argv, a program that cannot be
/// started, and inside a world larger than one; no rank is left then.
LaunchResult launch(const LaunchOptions& options);

} // namespace hasten
