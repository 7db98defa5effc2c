// A child process of another user (nobody), to test what such a process can do.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace hasten::testing_support {

/// True if this process may change its user.
inline bool can_be_a_stranger() { return ::geteuid() == 0; }

/// Starts `f` with uid and gid 65534. Its result, 0 to 99, is the exit code. `f` must only make
/// system calls, because the child does not have this process's other threads. The caller waits for
/// the child.
template <typename F>
pid_t start_stranger(const F& f) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) {
      ::_exit(100);
    }
    ::_exit(f());
  }
  return pid;
}

/// Calls start_stranger() and returns the exit code; -1 if the child was killed.
template <typename F>
int run_as_stranger(const F& f) {
  int status = 0;
  ::waitpid(start_stranger(f), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

} // namespace hasten::testing_support
