// What callbacks and signals ask of a run, and how ranks come to do it together.
//
// What every rank asks alike (a callback that decides from the values it is given) is
// done immediately. What one rank alone may ask (a signal, a clock, a callback that the
// others do not have) goes with its next window to all ranks. All do it after that
// optimizer step. With Local SGD, whose windows send nothing, it goes with the next
// synchronisation (WindowShared::requests).
#pragma once

#include <cstdint>
#include <vector>

#include "hasten/optim/schedule.h"
#include "trainer_parts.h"

namespace hasten::detail {

/// Bits of WindowShared::requests.
enum RunRequest : uint32_t {
  kRequestStop = 1,
  kRequestSave = 2,
  kRequestEvaluate = 4,
  kRequestLog = 8,
  kRequestTerminate = 16
};

class RunControl {
 public:
  /// `scheduler` gets the learning rates that callbacks set.
  RunControl(TrainerParts& parts, LRScheduler& scheduler) : parts_(parts), scheduler_(scheduler) {}

  /// Which callbacks every rank has. Collective.
  void compare_callbacks();
  /// Calls an event, then takes what callbacks ask for. `common`: every rank has this
  /// event.
  template <typename Call>
  void notify(Call&& call, bool common = true) {
    parts_.notify(call);
    take_controls(common);
  }
  void take_controls(bool common);
  /// Throws at SIGINT; asks the other ranks to terminate at SIGTERM.
  void check_signals();
  /// Takes what ranks asked for with a window or synchronisation that all of them were in.
  void hear();
  /// Whether this is to be done after this optimizer step; it is not any more then.
  bool take(uint32_t bit);

  /// A callback ended training, or set the learning rate. Checkpoints have both.
  bool stopping() const { return stopping_; }
  bool own_learning_rate() const { return own_learning_rate_; }
  void restore(bool stopping, bool own_learning_rate) {
    stopping_ = stopping;
    own_learning_rate_ = own_learning_rate;
  }
  /// All ranks know of a SIGTERM.
  bool terminating() const { return terminating_; }

 private:
  void ask(uint32_t bits, bool common);

  TrainerParts& parts_;
  LRScheduler& scheduler_;
  std::vector<bool> common_{}; // [callback]: every rank has it
  uint32_t asked_ = 0; // bits to do after this optimizer step, on all ranks
  bool asked_to_terminate_ = false; // this rank has asked the others
  bool stopping_ = false;
  bool own_learning_rate_ = false;
  bool terminating_ = false;
};

} // namespace hasten::detail
