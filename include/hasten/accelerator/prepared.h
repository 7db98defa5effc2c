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
  std::function<std::vector<at::Tensor>()> parameters{}; // of all groups, now
  std::function<size_t()> parameter_count{}; // of all groups, now
  size_t known_count = 0;
  std::function<void()> step{};
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

class OptimizerHandle {
 public:
  /// Steps if the window of its parameters is complete and it has not stepped for it yet; else does
  /// nothing. Local, because gradients are equal on every rank by then.
  /// Throws InputError for gradients that would make ranks differ (they wait under no_sync(), or
  /// come from a backward that is not the accelerator's), and for parameters added since that no
  /// prepared model has.
  StepResult step();
  /// Makes the gradients undefined, like torch's zero_grad(), unless a window is incomplete. Throws
  /// InputError if backwards under no_sync() wait to be reduced. Local.
  void zero_grad();

 protected:
  OptimizerHandle(std::shared_ptr<AcceleratorCore> core, std::shared_ptr<OptimizerState> state)
      : core_(std::move(core)), state_(std::move(state)) {}

 private:
  std::shared_ptr<AcceleratorCore> core_;
  std::shared_ptr<OptimizerState> state_;
};

class SchedulerHandle {
 public:
  /// Returns true if it stepped. Local.
  bool step();

 protected:
  SchedulerHandle(std::shared_ptr<AcceleratorCore> core, std::shared_ptr<SchedulerState> state)
      : core_(std::move(core)), state_(std::move(state)) {}

 private:
  std::shared_ptr<AcceleratorCore> core_;
  std::shared_ptr<SchedulerState> state_;
};

} // namespace detail

/// A prepared optimizer: step(), zero_grad(). `->` accesses the optimizer itself. If backward was called outside
/// accumulate(), step() and zero_grad() always act.
template <typename Optimizer>
class PreparedOptimizer : public detail::OptimizerHandle {
 public:
  PreparedOptimizer(std::shared_ptr<detail::AcceleratorCore> core,
                    std::shared_ptr<Optimizer> optimizer,
                    std::shared_ptr<detail::OptimizerState> state)
      : OptimizerHandle(std::move(core), std::move(state)), optimizer_(std::move(optimizer)) {}

  Optimizer* operator->() const { return optimizer_.get(); }
  Optimizer& operator*() const { return *optimizer_; }

 private:
  std::shared_ptr<Optimizer> optimizer_;
};

/// A learning-rate scheduler that steps once for every window for which its optimizers have stepped
/// (those of its prepare() call; all, if it had none). Its unit is the optimizer step, for any
/// number of ranks (see AcceleratorOptions::scheduler_ticks). If backward was called outside
/// accumulate(), it always steps, except after a skipped optimizer step.
template <typename Scheduler>
class PreparedScheduler : public detail::SchedulerHandle {
 public:
  PreparedScheduler(std::shared_ptr<detail::AcceleratorCore> core,
                    std::shared_ptr<Scheduler> scheduler,
                    std::shared_ptr<detail::SchedulerState> state)
      : SchedulerHandle(std::move(core), std::move(state)), scheduler_(std::move(scheduler)) {}

  Scheduler* operator->() const { return scheduler_.get(); }
  Scheduler& operator*() const { return *scheduler_; }

 private:
  std::shared_ptr<Scheduler> scheduler_;
};

} // namespace hasten
