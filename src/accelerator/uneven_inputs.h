// What happens when a rank's batches end: all ranks end together, or the rank takes part in the
// others' windows (Note [Ranks out of date]).
#pragma once

#include <functional>

#include "announcer.h"
#include "loader_set.h"
#include "local_windows.h"
#include "optimizer_set.h"

namespace hasten::detail {

/// The parts that the end of the data and a saved state concern.
struct AcceleratorParts : WindowParts {
  OpenBatch& batch_;
  LoaderSet& loaders_;
  OptimizerSet& optimizers_;
  Announcer& announcer_;
  LocalWindows& local_;
};

class UnevenInputs : private AcceleratorParts {
 public:
  explicit UnevenInputs(const AcceleratorParts& parts) : AcceleratorParts(parts) {}

  /// Takes part in a state that the other ranks save. Collective.
  std::function<void()> save_with_peers{};

  void begin_range(LoaderState& loader);
  void end_range(LoaderState& loader);
  /// The batches of `loader` (null: of all loaders) have ended on this rank. `joins`: the rank
  /// takes part in the others' windows; otherwise the others must end as well. Collective,
  /// blocking.
  void end_ranges(const LoaderState* loader, bool joins);
  /// The run ends. Collective.
  void end_run();
  /// Sends the state of a rank that trained to the end to the ranks that are out of date.
  /// Collective, blocking.
  void share_state();
  /// After a state was loaded.
  void reset() { out_of_date_ = false; }

 private:
  void take_part(const LoaderState* loader, bool joins);
  void join_until_all_finished(const LoaderState* loader, bool joins, bool& survivable);
  void end_with_replica(const LoaderState* loader);
  nlohmann::json collect_trained(NamedTensors& tensors) const;
  void take_trained(const NamedTensors& tensors, const nlohmann::json& values);
  void take_model(size_t index, const NamedTensors& tensors, const nlohmann::json& values);

  bool out_of_date_ = false; // this rank joined windows since it was equal to the others
};

} // namespace hasten::detail
