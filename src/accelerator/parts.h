// The parts of an accelerator by name, for those that use them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hasten {
class GradientWindow;
}

namespace hasten::detail {

class GradientChecks;
class LoaderSet;
class LocalWindows;
class MixedPrecision;
class ModelSet;
class OpenBatch;
class OptimizerSet;
class RunContext;
class WindowSet;
struct LoaderState;
struct StateToLoad;
struct StateToSave;

/// Slots of one model; `all`: every slot it has.
struct SlotList {
  size_t model = 0;
  bool all = false;
  std::vector<int64_t> slots{};
};

/// The parts below batches, optimizers and the state.
struct WindowParts {
  RunContext& run_;
  ModelSet& models_;
  WindowSet& windows_;
  MixedPrecision& precision_;
  GradientChecks& checks_;
};

} // namespace hasten::detail
