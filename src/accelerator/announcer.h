// Control vectors that announce a separate collective to ranks whose batches have ended: buffers, a
// forward that communicates, a synchronisation of Local SGD, a save.
#pragma once

#include <functional>
#include <optional>

#include "hasten/accumulation/window_control.h"
#include "window_set.h"

namespace hasten::detail {

class Announcer {
 public:
  Announcer(RunContext& run, ModelSet& models, WindowSet& windows);

  /// Called when a rank's state is out of date: see Note [Ranks out of date]. Collective.
  std::function<void()> share_state{};

  /// Makes buffers of these models equal, if they have some that the policy covers.
  /// `forward`: also announces a forward of those that communicate in it.
  void even_out_buffers(uint64_t models, bool forward = false);
  /// A training forward of these models comes. Collective if one of them is synced.
  void announce_forward(uint64_t models);
  /// The same, outside accumulate(): once for each window.
  void announce_forward_outside(size_t model);
  void forget_forwards(uint64_t models = ~uint64_t{0}) { announced_ &= ~models; }
  void announce_round(size_t model, uint64_t number, int64_t kind);
  /// Returns whether a rank's batches have ended.
  bool announce_save();
  /// The buffers themselves. `joined`: a rank's batches have ended; `here`: not this
  /// one's. The buffers of ranks whose batches have ended are out of date.
  void sync_buffers(uint64_t models, bool joined, bool here);

  /// The control vector of all ranks, and that of the ranks whom windows of these models
  /// concern: inside a LocalSGD scope those of one replica.
  WindowControl& control() { return control_; }
  WindowControl& control_of(uint64_t models);

 private:
  bool announce_models(uint64_t models);
  void refuse_joined(uint64_t models) const;

  RunContext& run_;
  ModelSet& models_;
  WindowSet& windows_;
  WindowControl control_;
  std::optional<WindowControl> replica_control_; // of local windows of one replica
  uint64_t announced_ = 0; // forwards outside accumulate(), since the last window
};

} // namespace hasten::detail
