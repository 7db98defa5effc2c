// For who answers SIGTERM when what is under way is complete, as a Trainer that saves.
// Threading: any.
#pragma once

namespace hasten {

/// While one lives, throw_if_interrupted() (hasten/base/process.h), and so whatever
/// waits, passes over SIGTERM. SIGINT counts as ever, interrupt_signal() tells both.
class TerminationDeferral {
 public:
  TerminationDeferral();
  TerminationDeferral(const TerminationDeferral&) = delete;
  TerminationDeferral& operator=(const TerminationDeferral&) = delete;
  ~TerminationDeferral();
};

} // namespace hasten
