// Settings of a thread while an object lives, which the threads that it starts inherit.
//
// Note [Broken pipe]
// Writing to a socket whose other end is closed raises SIGPIPE, which ends a process that does not
// handle it. Gloo and the store do so in their threads. (Python ignores the signal in the whole
// process; a library must not.)
//
// Note [Spinning]
// The thread that reads Gloo's sockets tries to lock a connection. If the lock is taken, it asks
// epoll again immediately. The threads that run operations yield in a loop until the reader has
// freed a buffer. Linux lets a thread that wakes up interrupt the running one. If the reader
// interrupts the holder of the lock on its own core, it spins for its whole time slice, and a small
// reduction takes as long as a time slice. A reader that interrupts no thread runs after the holder
// has released the lock.
#pragma once

#include <pthread.h>
#include <sched.h>

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

/// While it lives, this thread is in the class SCHED_BATCH. Threads that are started meanwhile stay
/// in it. They have the same share of the cores, but their wake-up interrupts no other thread. Does
/// nothing if the user has chosen another class for this thread.
class BatchThreads {
 public:
  BatchThreads() : chosen_(::sched_getscheduler(0) != SCHED_OTHER) { set(SCHED_BATCH); }
  ~BatchThreads() { set(SCHED_OTHER); }
  BatchThreads(const BatchThreads&) = delete;
  BatchThreads& operator=(const BatchThreads&) = delete;

 private:
  void set(int policy) {
    const sched_param parameters{};
    if (!chosen_) { // a sandbox may refuse it; then it is as without
      ::sched_setscheduler(0, policy, &parameters);
    }
  }

  const bool chosen_;
};

} // namespace hasten::detail
