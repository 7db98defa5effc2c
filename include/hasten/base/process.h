// Starts other programs (vfork and exec, because a process in which OpenMP has run must not fork
// and continue), reports how they ended, and handles SIGINT and SIGTERM. Also what this process
// has sent to others.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hasten {

struct SpawnOptions {
  /// Variables to add to this process's environment or to replace in it. If a name occurs
  /// several times, the last one counts.
  std::vector<std::pair<std::string, std::string>> environment{};
  /// Descriptors that the child keeps under the same number. All others are close-on-exec;
  /// 0, 1 and 2 are always kept.
  std::vector<int> keep_fds{};
  /// Descriptors that become the child's 0, 1 and 2. -1 keeps the parent's.
  int stdin_fd = -1;
  int stdout_fd = -1;
  int stderr_fd = -1;
  /// The child leads its own process group. A Ctrl-C in the terminal then reaches it only if
  /// this process forwards it.
  bool new_process_group = true;
  /// The kernel kills the child (SIGKILL) when the thread that spawned it ends.
  bool die_with_parent = true;
};

/// Starts argv[0] and returns its pid. Searches PATH if argv[0] has no slash. The caller waits for
/// the process. In the child no signal is blocked and all have their default action, except that
/// signals ignored here stay ignored. Between vfork and exec the child only makes system calls.
/// Throws InputError if argv[0] is not a program, and Error if it cannot be started for another
/// reason. After an exception there is no child.
pid_t spawn_process(const std::vector<std::string>& argv, const SpawnOptions& options = {});

/// How a child ended, from the status that waitpid returned.
struct ProcessEnd {
  /// Exit code, or 128 + signal number.
  int code = 0;
  /// Number of the signal that ended it; 0 if it exited.
  int signal = 0;
};
ProcessEnd process_end(int wait_status);

/// "exited with code 3", "was killed by signal 9 (Killed)".
std::string describe(const ProcessEnd& end);

/// State of a process in /proc. stopped: by a signal such as SIGSTOP, until SIGCONT. A process
/// that a debugger holds counts as running.
enum class ProcessState { running, stopped, ended };
/// `start_time` distinguishes the process from a later one with the same pid; 0: no check.
ProcessState process_state(int pid, uint64_t start_time);
/// Whether it has ended or is about to: it frees its memory, or has got SIGKILL.
bool is_ending(int pid);
/// Start time in clock ticks since boot. 0 if there is no such process or no /proc.
uint64_t process_start_time(int pid);

namespace detail {

/// Of /proc/PID/stat.
struct ProcessStat {
  char state = '\0'; // '\0': no such process
  bool ending = false; // it frees what it has
  int parent = 0;
  uint64_t start_time = 0;
};
ProcessStat process_stat(int pid);

/// The environment variable's value. Empty if it is not set or empty.
std::optional<std::string> environment_value(const std::string& name);

} // namespace detail

/// Binds 127.0.0.1:0 and listens. Returns {descriptor (close-on-exec), port}.
std::pair<int, int> listen_on_loopback();

/// The host's name; "localhost" if it has none.
std::string host_name();

/// `word` as a shell reads it back: in single quotes where it needs them.
std::string shell_quoted(const std::string& word);

/// This process's command line as a shell reads it; the program without its folder, and `hasten`
/// for its hasten-worker. Empty without /proc.
std::string command_line();

/// The value of the first "key: value" in a file of /proc; empty if there is none.
std::string proc_value(const char* path, const std::string& key);

/// Bytes that this process has sent over the TCP connections that are open now. The kernel counts
/// them: data without headers.
int64_t tcp_bytes_sent();

/// Installs handlers for SIGINT and SIGTERM that only remember the signal, even if the signals
/// were ignored before. A second signal of the same kind ends the process immediately with exit
/// code 128 + signal. Interrupted system calls are restarted.
void install_interrupt_handlers();
/// The last remembered signal, 0 if none. Cheap to poll.
int interrupt_signal();
/// Throws Interrupted if a signal is remembered.
void throw_if_interrupted();

/// While an object of this class lives, throw_if_interrupted(), and so every call that waits,
/// ignores SIGTERM, so that a caller can complete its work first. SIGINT still throws.
/// interrupt_signal() returns both. Any thread may use it.
class TerminationDeferral {
 public:
  TerminationDeferral();
  TerminationDeferral(const TerminationDeferral&) = delete;
  TerminationDeferral& operator=(const TerminationDeferral&) = delete;
  ~TerminationDeferral();
};

} // namespace hasten
