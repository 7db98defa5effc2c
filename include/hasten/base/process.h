// Starting other programs by exec (never a bare fork: a process that has run
// OpenMP may not fork and go on), and telling signals apart.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hasten {

struct SpawnOptions {
  /// Added to, or replacing, this process's environment; the last of a name
  /// counts.
  std::vector<std::pair<std::string, std::string>> environment{};
  /// Descriptors the child keeps under the same number; all others are
  /// close-on-exec. 0, 1 and 2 are always kept.
  std::vector<int> keep_fds{};
  /// Descriptors put in place of the child's 0, 1, 2; -1 keeps the parent's.
  int stdin_fd = -1;
  int stdout_fd = -1;
  int stderr_fd = -1;
  /// Child becomes leader of a process group of its own. Then a Ctrl-C of the
  /// terminal reaches it only through us.
  bool new_process_group = true;
  /// Kernel kills the child (SIGKILL) when the thread that spawned it dies.
  bool die_with_parent = true;
};

/// Starts argv[0] (searched in PATH when it has no slash). Returns its pid; the
/// caller waits for it. The child starts with no signal blocked and with default
/// actions, except for signals that are ignored here. Between vfork and exec it
/// makes system calls only.
/// Throws Error when it cannot be started, InputError where argv[0] is no
/// program; no child is left then.
pid_t spawn_process(const std::vector<std::string>& argv, const SpawnOptions& options = {});

/// How a child ended, from waitpid's status.
struct ProcessEnd {
  /// Exit code, or 128 + signal.
  int code = 0;
  /// 0 when it exited by itself.
  int signal = 0;
};
ProcessEnd process_end(int wait_status);

/// "exited with code 3", "was killed by signal 9 (Killed)".
std::string describe(const ProcessEnd& end);

/// How a process is, by /proc. stopped: by a signal (SIGSTOP), until SIGCONT; one that a
/// debugger holds counts as running.
enum class ProcessState { running, stopped, ended };
/// Another process that got the same number is told apart by its start; 0: it is not.
ProcessState process_state(int pid, uint64_t start_time);
/// In clock ticks since boot; 0 where there is no such process, or no /proc.
uint64_t process_start_time(int pid);

/// Binds 127.0.0.1:0 and listens. Returns {descriptor (close-on-exec), port}.
std::pair<int, int> listen_on_loopback();

/// Installs handlers for SIGINT and SIGTERM, also where they were ignored, that
/// only remember the signal; a second one of the same kind ends the process at
/// once with exit code 128 + signal. Interrupted system calls are restarted.
void install_interrupt_handlers();
/// The remembered signal (the latest), 0 if none. Cheap to poll.
int interrupt_signal();
/// Throws Interrupted if a signal is remembered.
void throw_if_interrupted();

} // namespace hasten
