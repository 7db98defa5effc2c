// Lets a caller complete its work before it handles SIGTERM, such as a Trainer that saves.
// Threading: any thread.
#pragma once

namespace hasten {

/// While an object of this class lives, throw_if_interrupted() (hasten/base/process.h), and so
/// every call that waits, ignores SIGTERM. SIGINT still throws. interrupt_signal() returns both.
class TerminationDeferral {
 public:
  TerminationDeferral();
  TerminationDeferral(const TerminationDeferral&) = delete;
  TerminationDeferral& operator=(const TerminationDeferral&) = delete;
  ~TerminationDeferral();
};

} // namespace hasten
