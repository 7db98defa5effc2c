// State that a region's forward depends on in addition to its inputs, and that a recomputation
// restores: random generators and autocast.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>
#include <vector>

#include "hasten/core/autocast.h"
#include "hasten/core/recompute.h"

namespace hasten::detail {

/// State of torch's default CPU generator, copied without a tensor.
class CpuRandomState {
 public:
  static CpuRandomState now();
  /// Whether both states are equal.
  bool same_as(const CpuRandomState& other) const;
  void restore() const;

 private:
  at::mt19937 engine_{};
  std::optional<float> next_float_{};
  std::optional<double> next_double_{};
};

/// The CPU state and the states of the default generators of the tensors' devices.
class RandomState {
 public:
  static RandomState now(const std::vector<at::Tensor>& tensors);
  /// The current state of the same generators.
  RandomState again() const;
  void restore() const;

 private:
  CpuRandomState cpu_{};
  std::vector<std::pair<at::Device, at::Tensor>> devices_{};
};

/// Sets a state while it lives and then restores the earlier one. Without a state it does nothing.
template <typename State>
class StateScope {
 public:
  explicit StateScope(const std::optional<State>& state) {
    if (state) {
      before_ = state->again();
      state->restore();
    }
  }
  StateScope(const StateScope&) = delete;
  StateScope& operator=(const StateScope&) = delete;
  ~StateScope() {
    if (before_) {
      before_->restore();
    }
  }

 private:
  std::optional<State> before_{};
};

/// What a forward depends on in addition to its inputs.
struct ForwardState {
  std::optional<RandomState> random{}; // only with ActivationCheckpointOptions::preserve_rng_state
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
  ~RecomputeScope() { drop_casts(); }

 private:
  void drop_casts() const;

  StateScope<RandomState> random_;
  StateScope<AutocastState> autocast_;
  bool casts_;
  OnceScope once_;
  at::AutoGradMode grad_mode_{true};
};

} // namespace hasten::detail
