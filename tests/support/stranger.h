// What a process of another user of this machine can do: a child that becomes nobody.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace hasten::testing_support {

/// True where this process may become somebody else.
inline bool can_be_a_stranger() { return ::geteuid() == 0; }

/// Starts `f` under uid and gid 65534; its result, 0 to 99, is the exit code. `f` makes
/// system calls only: other threads of this process are not in the child. The caller
/// waits for it.
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

/// start_stranger() and its exit code; -1 where it was killed.
template <typename F>
int run_as_stranger(const F& f) {
  int status = 0;
  ::waitpid(start_stranger(f), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

} // namespace hasten::testing_support
