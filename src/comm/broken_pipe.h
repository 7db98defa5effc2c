// Writing to a socket whose other end is closed raises SIGPIPE, which ends a process that does not
// handle it. Gloo and the store do so in their threads. (Python ignores the signal in the whole
// process; a library must not.)
#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace hasten::detail {

/// Blocks SIGPIPE in this thread while it lives, and permanently in threads that are started
/// meanwhile. A broken connection is then an error and raises no signal.
class NoBrokenPipeSignal {
 public:
  NoBrokenPipeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~NoBrokenPipeSignal() {
    if (sigismember(&before_, SIGPIPE) == 0) {
      const timespec now{};
      ::sigtimedwait(&signal_, nullptr, &now); // takes a signal that arrived meanwhile
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoBrokenPipeSignal(const NoBrokenPipeSignal&) = delete;
  NoBrokenPipeSignal& operator=(const NoBrokenPipeSignal&) = delete;

 private:
  sigset_t signal_{};
  sigset_t before_{};
};

} // namespace hasten::detail
