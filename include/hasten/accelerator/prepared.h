// The handles that Accelerator::prepare returns for optimizers and schedulers. They are movable.
// They borrow the objects (which must outlive them; a shared_ptr is kept) and share the
// accelerator's state, which lives as long as the last of them.
// Threading: the thread that uses the Accelerator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "hasten/core/stateful.h"

namespace torch::optim {
class Optimizer;
}

namespace hasten {

class FusedOptimizer;

/// What PreparedOptimizer::step() did. Converts to true if it stepped.
class StepResult {
 public:
  enum Kind {
    stepped,
    /// The window is not complete, or the optimizer has stepped for it already.
    inside_window,
    /// Skipped because a value of the window is not finite (see
    /// AcceleratorOptions::skip_non_finite_steps). The scheduler does not step, either.
    skipped,
  };
  StepResult(Kind kind) : kind_(kind) {}
  operator bool() const { return kind_ == stepped; }
  bool was_skipped() const { return kind_ == skipped; }
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

namespace detail {

class AcceleratorCore;

// The core's state of a prepared optimizer or scheduler.
struct OptimizerState {
  size_t known_count = 0; // of parameters, when they were looked up
  std::shared_ptr<torch::optim::Optimizer> optimizer{};
  FusedOptimizer* fused = nullptr; // `optimizer`, if it is a FusedOptimizer
  int64_t index = 0; // in order of preparation, the same on every rank
  uint64_t stepped = 0; // number of the last window it stepped for
  bool skipped = false; // its last step() was skipped because of a non-finite value
};
struct SchedulerState {
  std::function<void()> step{};
  std::shared_ptr<Stateful> stateful{}; // null: its state is unknown
  std::vector<std::shared_ptr<OptimizerState>> optimizers{};
  int64_t index = 0;
  uint64_t stepped = 0;
  int64_t ticks = 0;
};

// Shares the state of a prepared object.
template <typename State>
class Handle {
 protected:
  Handle(std::shared_ptr<AcceleratorCore> core, std::shared_ptr<State> state)
      : core_(std::move(core)), state_(std::move(state)) {}

  std::shared_ptr<AcceleratorCore> core_;
  std::shared_ptr<State> state_;
};

class OptimizerHandle : public Handle<OptimizerState> {
 public:
  using Handle::Handle;
  /// Steps if the window of its parameters is complete and it has not stepped for it yet; else does
  /// nothing. Local, because gradients are equal on every rank by then.
  /// Throws InputError for gradients that would make ranks differ (they wait under no_sync(), or
  /// come from a backward that is not the accelerator's), and for parameters added since that no
  /// prepared model has.
  StepResult step();
  /// Makes the gradients undefined, like torch's zero_grad(), unless a window is incomplete. Throws
  /// InputError if backwards under no_sync() wait to be reduced. Local.
  void zero_grad();
};

class SchedulerHandle : public Handle<SchedulerState> {
 public:
  using Handle::Handle;
  /// Returns true if it stepped. Local.
  bool step();
};

// `->` and `*` access the object itself.
template <typename Object, typename Base>
class Prepared : public Base {
 public:
  template <typename State>
  Prepared(std::shared_ptr<AcceleratorCore> core, std::shared_ptr<Object> object,
           std::shared_ptr<State> state)
      : Base(std::move(core), std::move(state)), object_(std::move(object)) {}

  Object* operator->() const { return object_.get(); }
  Object& operator*() const { return *object_; }

 private:
  std::shared_ptr<Object> object_;
};

} // namespace detail

/// A prepared optimizer: step(), zero_grad(). `->` accesses the optimizer itself. If backward was called outside
/// accumulate(), step() and zero_grad() always act.
template <typename Optimizer>
using PreparedOptimizer = detail::Prepared<Optimizer, detail::OptimizerHandle>;

/// A learning-rate scheduler that steps once for every window for which its optimizers have stepped
/// (those of its prepare() call; all, if it had none). Its unit is the optimizer step, for any
/// number of ranks (see AcceleratorOptions::scheduler_ticks). If backward was called outside
/// accumulate(), it always steps, except after a skipped optimizer step.
template <typename Scheduler>
using PreparedScheduler = detail::Prepared<Scheduler, detail::SchedulerHandle>;

} // namespace hasten
