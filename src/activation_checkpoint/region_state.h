// State that a region's forward depends on in addition to its inputs, and that a recomputation
// restores: random generators and autocast.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <vector>

#include "hasten/core/autocast.h"
#include "hasten/core/device.h"
#include "hasten/core/recompute.h"

namespace hasten::detail {

/// What a forward depends on in addition to its inputs.
struct ForwardState {
  GeneratorStates random{}; // empty without ActivationCheckpointOptions::preserve_rng_state
  AutocastState autocast{};

  static ForwardState now(const std::vector<at::Tensor>& inputs, bool preserve_rng_state);
  void restore() const;
};

/// While it lives, this thread recomputes a forward that had this state and place.
class RecomputeScope {
 public:
  RecomputeScope(const ForwardState& forward, const OncePlace& once);
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
  ~RecomputeScope();

 private:
  void drop_casts() const;

  GeneratorScope random_;
  AutocastState autocast_before_;
  bool casts_;
  OnceScope once_;
  at::AutoGradMode grad_mode_{true};
};

} // namespace hasten::detail
