// Whoever writes to a socket whose other end has died gets SIGPIPE, which ends a
// process that does not expect it. Gloo and the store write so, from threads of
// theirs (Python ignores the signal in the whole process; a library may not).
#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace hasten::detail {

/// Blocks SIGPIPE in this thread while it lives, and for good in threads that are
/// started meanwhile: a broken connection is an error there, and no signal.
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
      ::sigtimedwait(&signal_, nullptr, &now); // one that came meanwhile
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
