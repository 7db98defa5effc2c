// The parts behind an Accelerator and its handles, in the order in which they are made:
// each uses only those above it.
#pragma once

#include <memory>
#include <vector>

#include "checkpointer.h"
#include "hasten/accelerator/collect.h"
#include "hasten/tracking/tracker.h"

namespace hasten::detail {

class AcceleratorCore {
 public:
  AcceleratorCore(AcceleratorOptions options, std::shared_ptr<Communicator> communicator);

  RunContext run;
  ModelSet models;
  WindowSet windows;
  MixedPrecision precision;
  GradientChecks checks;
  LoaderSet loaders;
  Announcer announcer;
  OpenBatch batch;
  OptimizerSet optimizers;
  LocalWindows local;
  UnevenInputs uneven;
  Checkpointer checkpointer;
  std::vector<std::shared_ptr<SafeTracker>> trackers{}; // without a tracker except on rank 0

  /// In debug mode: throws unless the ranks' parameters are equal. Collective.
  void compare_ranks();
  void finish();
  void finish_trackers();

 private:
  WindowParts window_parts() { return {run, models, windows, precision, checks}; }
  AcceleratorParts parts() {
    return {window_parts(), batch, loaders, optimizers, announcer, local};
  }
};

} // namespace hasten::detail
