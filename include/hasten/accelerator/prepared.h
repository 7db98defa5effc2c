// The handles that Accelerator::prepare makes of optimizers and schedulers. They
// are movable, borrow what they were made from (it must outlive them; a shared_ptr
// is kept) and share the accelerator's state, which lives as long as the last of
// them.
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

/// What PreparedOptimizer::step() did. Converts to "it stepped".
class StepResult {
 public:
  enum Kind {
    stepped,
    /// The window is not complete, or it has stepped for it.
    inside_window,
    /// Not to be done: a number of the window is not finite (see
    /// AcceleratorOptions::skip_non_finite_steps). The schedule stays.
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

// What the core knows of a prepared optimizer or scheduler.
struct OptimizerState {
  std::function<std::vector<at::Tensor>()> parameters{}; // of all groups, now
  std::function<size_t()> parameter_count{}; // of all groups, now
  size_t known_count = 0;
  std::function<void()> step{};
  std::shared_ptr<torch::optim::Optimizer> optimizer{};
  FusedOptimizer* fused = nullptr; // the same, if it is one
  int64_t index = 0; // in order of preparation, the same on every rank
  uint64_t stepped = 0; // number of the last window it stepped for
  bool skipped = false; // its last step() was, because of a non-finite number
};
struct SchedulerState {
  std::function<void()> step{};
  std::shared_ptr<Stateful> stateful{}; // null: its state is not known
  std::vector<std::shared_ptr<OptimizerState>> optimizers{};
  int64_t index = 0;
  uint64_t stepped = 0;
  int64_t ticks = 0;
};

// Non-template doors into the core, so that this header needs none of it.
StepResult core_optimizer_step(AcceleratorCore& core, OptimizerState& optimizer);
void core_zero_grad(AcceleratorCore& core, OptimizerState& optimizer);
bool core_scheduler_step(AcceleratorCore& core, SchedulerState& scheduler);

} // namespace detail

/// An optimizer inside windows. `->` reaches the optimizer itself. Where backward
/// was called outside accumulate(), step() and zero_grad() always act.
template <typename Optimizer>
class PreparedOptimizer {
 public:
  PreparedOptimizer(std::shared_ptr<detail::AcceleratorCore> core,
                    std::shared_ptr<Optimizer> optimizer,
                    std::shared_ptr<detail::OptimizerState> state)
      : core_(std::move(core)), optimizer_(std::move(optimizer)), state_(std::move(state)) {}

  /// Steps if the window of its parameters is complete and it has not stepped
  /// for it; else does nothing. Local: gradients are equal on every rank by then.
  /// Throws InputError for what would make ranks differ: gradients that wait
  /// under no_sync(), or come from a backward other than the accelerator's; and
  /// for parameters added since that no prepared model has.
  StepResult step() { return detail::core_optimizer_step(*core_, *state_); }
  /// Makes the gradients undefined, as torch's zero_grad() does, if the window is
  /// complete, else does nothing. Local.
  void zero_grad() { detail::core_zero_grad(*core_, *state_); }

  Optimizer* operator->() const { return optimizer_.get(); }
  Optimizer& operator*() const { return *optimizer_; }

 private:
  std::shared_ptr<detail::AcceleratorCore> core_;
  std::shared_ptr<Optimizer> optimizer_;
  std::shared_ptr<detail::OptimizerState> state_;
};

/// A learning-rate scheduler that ticks once for every window its optimizers
/// (those of its prepare() call; all, if it had none) have stepped for: its unit
/// is the optimizer step, whatever the number of ranks (see
/// AcceleratorOptions::scheduler_ticks). Where backward was called outside
/// accumulate() it always ticks, except after a step that was skipped.
template <typename Scheduler>
class PreparedScheduler {
 public:
  PreparedScheduler(std::shared_ptr<detail::AcceleratorCore> core,
                    std::shared_ptr<Scheduler> scheduler,
                    std::shared_ptr<detail::SchedulerState> state)
      : core_(std::move(core)), scheduler_(std::move(scheduler)), state_(std::move(state)) {}

  /// Returns whether it ticked. Local.
  bool step() { return detail::core_scheduler_step(*core_, *state_); }

  Scheduler* operator->() const { return scheduler_.get(); }
  Scheduler& operator*() const { return *scheduler_; }

 private:
  std::shared_ptr<detail::AcceleratorCore> core_;
  std::shared_ptr<Scheduler> scheduler_;
  std::shared_ptr<detail::SchedulerState> state_;
};

} // namespace hasten
