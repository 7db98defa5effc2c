// Shared by both kinds of multi-rank tests: ranks are processes of the same program, and each sends
// JSON lines to the parent through a pipe.
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
  int reports_fd = -1; // -1 after the rank has closed it
  std::string unread{}; // the beginning of a line
  ProcessEnd end{};
  bool ended = false;
};

/// Starts `world_size` processes of this program. Each has torchrun's variables, one OpenMP thread,
/// a process group and a pipe for reports. They die with the calling thread. Only rank 0 gets
/// descriptors that already listen: one for MASTER_PORT and one for the harness's store.
std::vector<RankProcess> start_ranks(int world_size, const std::vector<std::string>& argv,
                                     const EnvironmentList& environment);

/// Reads the available bytes. Returns whole lines as JSON. At the pipe's end it closes the pipe and
/// waits for the process.
std::vector<nlohmann::json> read_reports(RankProcess& rank);

/// Waits until one of the open pipes has bytes, at most `milliseconds`.
void wait_for_reports(const std::vector<RankProcess>& ranks, int milliseconds);

/// True if a signal (SIGSTOP) has stopped the rank.
bool is_stopped(const RankProcess& rank);

/// Sends SIGKILL to the rank's process group and waits for its end.
void kill_rank(RankProcess& rank);

bool all_ended(const std::vector<RankProcess>& ranks);

/// The child's end of the pipe.
class ReportWriter {
 public:
  /// Gets the descriptor from the environment. Only for ranks.
  ReportWriter();
  /// May be called from any thread. Lines are never mixed. Gives up after a second if another
  /// thread hangs in it.
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
