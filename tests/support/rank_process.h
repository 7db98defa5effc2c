// What both kinds of multi-rank tests share: ranks started from this very
// program, and JSON lines that they send back through a pipe each.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/process.h"

namespace hasten::testing_support {

using EnvironmentList = std::vector<std::pair<std::string, std::string>>;

/// The parent's view of one rank.
struct RankProcess {
  pid_t pid = -1;
  int reports_fd = -1; // -1 once the rank has closed it
  std::string unread{}; // the beginning of a line
  ProcessEnd end{};
  bool ended = false;
};

/// Starts `world_size` processes of this program with torchrun's variables, one
/// OpenMP thread each, their own process groups and a report pipe; they die with
/// the calling thread. Rank 0 alone gets descriptors that already listen: one
/// for MASTER_PORT and one for the harness's own store.
std::vector<RankProcess> start_ranks(int world_size, const std::vector<std::string>& argv,
                                     const EnvironmentList& environment);

/// Reads what has come. Returns whole lines as JSON; closes the pipe at its end
/// and waits for the process then.
std::vector<nlohmann::json> read_reports(RankProcess& rank);

/// Waits until one of the open pipes has something, at most `milliseconds`.
void wait_for_reports(const std::vector<RankProcess>& ranks, int milliseconds);

/// True where a signal has stopped it (SIGSTOP).
bool is_stopped(const RankProcess& rank);

/// SIGKILL to the rank's process group; waits for its end.
void kill_rank(RankProcess& rank);

bool all_ended(const std::vector<RankProcess>& ranks);

/// The child's end of the pipe.
class ReportWriter {
 public:
  /// Takes the descriptor from the environment; for ranks only.
  ReportWriter();
  /// Any thread; a line is never torn. Gives up after a second if another
  /// thread is stuck in it.
  void send(const nlohmann::json& report);

 private:
  int fd_;
  std::timed_mutex mutex_;
};

/// True in a process that start_ranks() made.
bool is_rank_process();

/// Seconds on the clock that all processes of this machine share.
double machine_seconds();

} // namespace hasten::testing_support
