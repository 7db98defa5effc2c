// Gloo's threads, where there are fewer cores than threads that have work.
//
// Note [Spinning]
// The thread that reads Gloo's sockets tries the lock of a connection and, where it is
// taken, asks epoll again at once; the threads that run operations yield in a loop until
// the reader has let go of a buffer. Linux lets a thread that wakes up interrupt the one
// that runs. Where the reader so interrupts a holder of the lock on its own core, it spins
// away all of its turn for nothing, and a small reduction takes as long as a turn of the
// scheduler. A reader that interrupts nobody waits until the holder has let go.
#pragma once

#include <sched.h>

namespace hasten::detail {

/// While it lives, this thread and for good those that are started meanwhile are of the
/// class SCHED_BATCH: with the same share of the cores, but their wake-up interrupts
/// nobody. Does nothing to a thread for which the user has chosen another class.
class BatchThreads {
 public:
  BatchThreads() : chosen_(::sched_getscheduler(0) != SCHED_OTHER) { set(SCHED_BATCH); }
  ~BatchThreads() { set(SCHED_OTHER); }
  BatchThreads(const BatchThreads&) = delete;
  BatchThreads& operator=(const BatchThreads&) = delete;

 private:
  void set(int policy) {
    const sched_param parameters{};
    if (!chosen_) { // may be refused in a sandbox: it is no worse than without then
      ::sched_setscheduler(0, policy, &parameters);
    }
  }

  const bool chosen_;
};

} // namespace hasten::detail
