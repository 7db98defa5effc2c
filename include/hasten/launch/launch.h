// Starts the ranks of a world on this host, or its part of them, and returns when all have ended.
// Ranks inherit stdout and stderr unless LogsSpecs says otherwise. Output of one write(2) is not
// mixed with other output (hasten writes each log line with one). If a program prints results
// through a buffered stream, print them only on rank 0 or launch it with `tee`. Rank 0 inherits
// stdin unless that is a terminal; the other ranks read nothing.
// Threading: blocks the calling thread. It should be the only thread of the program, because a
// signal that another thread receives is not forwarded.
#pragma once

#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/process.h"
#include "hasten/base/timeouts.h"
#include "hasten/base/world.h"

namespace hasten {

/// Standard streams, with torchrun's numbers.
enum class Std { none = 0, out = 1, err = 2, all = 3 };

/// Selects standard streams of ranks.
struct RankStreams {
  /// For ranks that are not in `ranks`.
  Std others = Std::none;
  std::map<int, Std> ranks{};

  bool has(int rank, Std stream) const;
  bool any() const;
};
/// Parses torchrun's notation: "3" is both streams of every rank, "1" stdout, "2" stderr, "0"
/// none; "0:3,2:1" is both streams of rank 0, stdout of rank 2, and none of the other ranks.
/// Throws InputError for other texts.
RankStreams parse_rank_streams(const std::string& text);

/// Parses names of signals, "SIGTERM,SIGUSR1". Throws InputError for a name that is not that of a
/// signal, and for SIGKILL, SIGSTOP, SIGTSTP, SIGCONT and SIGCHLD, which a launcher cannot take or
/// needs itself.
std::vector<int> parse_signals(const std::string& text);
/// The names as parse_signals() reads them.
std::string signal_names(const std::vector<int>& signals);

/// Where the ranks' output goes. The names are torchrun's.
struct LogsSpecs {
  /// Folder for the files RANK/stdout.log and RANK/stderr.log. It is created if it does not exist.
  /// Existing files are appended to. Empty (default): no files. If neither `redirects` nor `tee`
  /// selects a stream, all streams are teed.
  std::filesystem::path log_dir{};
  /// Streams that are written only to their file. Needs log_dir. Default: none.
  RankStreams redirects{};
  /// Streams that are copied to this process's own, line by line with a prefix, and to their
  /// file if there is a log_dir. Costs a thread and a copy. The rank sees a pipe instead of a
  /// terminal. Default: none.
  RankStreams tee{};
  /// The prefix. ${rank}, ${local_rank} and ${role_name} are replaced.
  std::string log_line_prefix_template = "[rank${rank}]: ";
  /// Local ranks whose output reaches this process's own streams, each < nproc. What the other
  /// ranks write goes only to their files, and is lost if a stream has none. Empty (default): all
  /// ranks. Costs nothing.
  std::set<int> local_ranks_filter{};

  bool any() const {
    return !log_dir.empty() || redirects.any() || tee.any() || !local_ranks_filter.empty();
  }
  /// Whether this stream of the rank reaches this process's own.
  bool on_console(int rank, Std stream) const;
};

/// How the launchers of several hosts ("nodes") meet: one on each, started with the same options. The
/// names are torchrun's. Node 0's launcher serves the store in which they and all ranks meet, at the
/// endpoint's port on every interface, to all that know the secret (HASTEN_SECRET_FILE). Its ranks
/// come first in the world, then those of node 1, and so on.
struct RendezvousOptions {
  /// Number of hosts. 1 (default): only this one, and nothing listens on the network. If max_nodes is
  /// greater, the launchers that have come within last_call_timeout after the first min_nodes begin.
  int min_nodes = 1;
  int max_nodes = 1;
  /// This host's number, 0 … max_nodes - 1. -1 (default): the host that has the endpoint's address
  /// is node 0, and the others are numbered by host name after the last has come.
  int node_rank = -1;
  /// "HOST:PORT", the same on every host: where node 0 is reached.
  std::string endpoint{};
  /// Name of the run. Launchers with another one are refused.
  std::string rdzv_id = "none";
  /// Whether this host is node 0, where the endpoint's address does not show it (NAT).
  std::optional<bool> is_host{};
  /// Maximum wait for the launchers of all hosts. Seconds.
  std::chrono::seconds join_timeout{600};
  /// See min_nodes. Seconds.
  std::chrono::seconds last_call_timeout{30};
  /// What else must be the same on all hosts, by name. Costs one message.
  std::map<std::string, std::string> same{};

  bool several() const { return max_nodes > 1; }
};

struct LaunchOptions {
  /// Number of ranks to start on this host, ≥ 1. It may differ between hosts.
  int nproc = 1;
  /// The program and its arguments. Searches PATH if the program has no slash.
  std::vector<std::string> argv{};
  /// Environment variables of the ranks, in addition to the launcher's or replacing them.
  std::vector<std::pair<std::string, std::string>> environment{};
  /// Lets the other ranks continue after the failure of a rank, if their program can do so
  /// (LocalSGDOptions::on_peer_failure). Only rank 0's failure ends the others and decides how the
  /// launch ended. The failures of other ranks are logged.
  bool keep_going = false;
  RendezvousOptions rendezvous{};
  LogsSpecs logs{};
  /// A rank that a signal (SIGSTOP) has stopped for most of this time counts as failed and is
  /// killed. A rank held by a debugger does not count, and neither does the time for which the
  /// launcher itself is stopped (Ctrl-Z). Milliseconds.
  std::chrono::milliseconds heartbeat_timeout = default_heartbeat_timeout();
  /// Time from the first failure to SIGTERM for the other ranks, in which they can report their
  /// own errors. Milliseconds.
  std::chrono::milliseconds settle{3'000};
  /// Time from that SIGTERM to SIGKILL. Milliseconds.
  std::chrono::milliseconds grace{5'000};
  /// Time from a forwarded signal to SIGKILL, in which ranks can finish a step and save. A second
  /// signal shortens it to one second. Milliseconds.
  std::chrono::milliseconds interrupt_grace{30'000};
  /// Signals that the launcher passes on to every rank and that then end the launch, by number. Any
  /// other signal has its usual effect on the launcher; if it ends the launcher, the ranks are
  /// killed without a chance to save. SIGHUP is left alone if it is ignored (nohup). Default:
  /// SIGINT, SIGTERM and SIGHUP. Costs nothing.
  std::vector<int> signals_to_handle{SIGINT, SIGTERM, SIGHUP};
  /// How often failed ranks are restarted. Only 0 (default): hasten does not restart ranks. Start
  /// the program again, and let it resume from its last checkpoint.
  int max_restarts = 0;
};

struct LaunchResult {
  /// 0 if all ranks ended with 0; 128 + n if signal n stopped the launcher. Otherwise the exit
  /// code of the rank that failed first: 128 + n if signal n killed it, 1 if it froze.
  int exit_code = 0;
  /// The rank that failed first, on any host. -1 if no rank failed before the launcher was stopped, or
  /// a host was lost.
  /// If ranks recorded errors (recorded_error.h), it is the rank with the earliest error that did
  /// not follow from a peer's failure, even if it ended after its peers. Otherwise it is the rank
  /// that ended first.
  int first_failed_rank = -1;
  /// Why the launch failed: "rank 1 exited with code 3 first", "rank 0 froze first", "stopped by
  /// signal 2 (Interrupt)". Empty if exit_code is 0.
  std::string reason{};
  /// The message that this rank recorded. Otherwise the last lines of its stderr if that was
  /// written only to a file. Otherwise empty.
  std::string message{};
  /// True if ranks printed this message, and all others that they recorded, on this process's
  /// stderr.
  bool shown = false;
  /// The other failed ranks, in the order of their failures: "rank 0 exited with code 1", and the
  /// message if it is another one that nobody printed. They probably follow from the first.
  std::vector<std::string> consequences{};
  /// How each rank ended. [rank]
  std::vector<ProcessEnd> ends{};
};

/// Starts `nproc` processes with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT, TORCHELASTIC_ERROR_FILE, …) and with OMP_NUM_THREADS from threads_per_rank(). Warns
/// if these are more threads than cores (affinity and cgroup quota). A thread of this process,
/// which handles no signals, serves the store in which the ranks meet, at a Unix socket
/// (HASTEN_STORE_SOCKET) for this user and root. MASTER_PORT is a port that was free. Each rank
/// leads a process group, which is killed when the rank ends. All ranks are killed when this
/// process ends, even by SIGKILL.
/// Forwards `signals_to_handle`. SIGTSTP (Ctrl-Z) stops the ranks and the launcher; they continue
/// together. Blocks until every rank has ended.
/// With several hosts: blocks until their launchers have met and the ranks of all hosts have ended,
/// and returns the same first failure on every host. The launchers exchange heartbeats, first
/// failures and signals four times a second. A launcher from which nothing has come for
/// heartbeat_timeout counts as failed, on all hosts. A signal that one of them gets goes to all ranks.
/// Throws InputError for nproc < 1, an empty argv, a program that cannot be started, logs that
/// cannot be written or that name a rank that does not exist, a signal that parse_signals()
/// refuses, max_restarts other than 0, and inside a world of several ranks; on all hosts, if two have
/// one node_rank, or if they differ in program, version, rdzv_id or RendezvousOptions::same. Throws
/// CommunicationError that names the missing hosts after join_timeout. After an exception no rank is
/// left.
LaunchResult launch(const LaunchOptions& options);

/// The world of another launcher in which this process is a rank; else alone. If `rendezvous` has
/// several hosts, a step of Slurm with one launcher on each host does not count, and neither do
/// incomplete variables. Otherwise throws like world_from_environment().
World outer_world(const RendezvousOptions& rendezvous);

/// Removes temporary folders of this user's launchers that were killed. launch() calls it when it
/// creates such a folder.
void remove_folders_of_killed_launchers();

} // namespace hasten
