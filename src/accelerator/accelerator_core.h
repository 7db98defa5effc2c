// The parts behind an Accelerator and its handles, in the order in which they are made:
// each uses only those above it.
#pragma once

#include <memory>
#include <vector>

#include "checkpointer.h"
#include "gradient_checks.h"
#include "hasten/accelerator/collect.h"
#include "hasten/tracking/tracker.h"
#include "loader_set.h"
#include "local_windows.h"
#include "mixed_precision.h"
#include "model_set.h"
#include "open_batch.h"
#include "optimizer_set.h"
#include "run_context.h"
#include "window_set.h"

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
  OpenBatch batch;
  OptimizerSet optimizers;
  LocalWindows local;
  Checkpointer checkpointer;
  std::vector<std::shared_ptr<SafeTracker>> trackers{}; // without a tracker except on rank 0

  /// A pass over a loader begins, and ends on this rank.
  void begin_pass(LoaderState& loader);
  void end_pass(LoaderState& loader);
  /// The batches of `loader` (null: of all loaders) have ended on this rank. Other ranks must be at
  /// the same end. Inside LocalSGD, unless the ranks know each other's batches, this rank takes part
  /// in the others' synchronisations until they are. Collective, blocking.
  void end_of_data(const LoaderState* loader);
  void finish();
  void finish_trackers();

 private:
  WindowParts window_parts() { return {run, models, windows, precision, checks}; }
  AcceleratorParts parts() { return {window_parts(), batch, loaders, optimizers, local}; }
};

} // namespace hasten::detail
