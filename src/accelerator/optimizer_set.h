// The prepared optimizers and schedulers: when they step, and clipping.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "hasten/accelerator/gradients.h"
#include "hasten/accelerator/prepared.h"
#include "parts.h"

namespace hasten::detail {

/// What to do with gradients: clip by value if clip_value is above 0, else by norm.
struct GradientClip {
  double max_norm = 0;
  double norm_type = 2;
  double clip_value = 0;
  bool error_if_nonfinite = false;
};

class OptimizerSet : private WindowParts {
 public:
  OptimizerSet(const WindowParts& parts, OpenBatch& batch) : WindowParts(parts), batch_(batch) {}

  /// The parameters of a model were frozen, unfrozen or replaced, and it was prepared again.
  void models_changed();
  /// The same state for an optimizer that is prepared.
  std::shared_ptr<OptimizerState> prepare(
      const std::shared_ptr<torch::optim::Optimizer>& optimizer);
  std::shared_ptr<SchedulerState> prepare_scheduler(
      std::function<void()> step, std::vector<std::shared_ptr<OptimizerState>> optimizers);

  StepResult step(OptimizerState& optimizer);
  void zero_grad(OptimizerState& optimizer);
  bool scheduler_step(SchedulerState& scheduler);
  /// Completes the data's last windows that lack a backward, and repeats for them the calls that
  /// followed the windows before.
  void complete_at_end(const LoaderState* loader);
  void forget_done() { done_.clear(); }

  // gradients.cpp
  DeviceScalar clip(const std::vector<SlotList>& lists, const GradientClip& how);
  GradientNorms gradient_norms(size_t model, const GradientNormsOptions& options);

  /// The optimizers that have parameters of the model.
  std::vector<std::shared_ptr<OptimizerState>> of_model(size_t model) const;
  /// The step count of each scheduler.
  std::vector<int64_t> ticks() const;
  /// Steps the schedulers until they have these counts.
  void tick_until(const int64_t* ticks);

  // optimizer_set_state.cpp
  void collect(StateToSave& parts) const;
  void add_to(StateToLoad& load);
  /// Optimizers of the model, as each rank has them inside a LocalSGD scope.
  void collect_local(size_t model, StateToSave& parts) const;
  void add_local_to(size_t model, StateToLoad& load);

 private:
  /// A call that used a window's gradients.
  struct Done {
    uint64_t window; // WindowSet::serial() then
    std::function<void()> again;
    int64_t optimizer; // the optimizer whose step it was; -1: none
  };
  /// The gradients of a list's parameters, and the same elements in few tensors.
  struct Gathered {
    std::vector<at::Tensor> gradients{};
    std::vector<at::Tensor> pieces{};
  };
  const std::vector<SlotList>& lists_of(const OptimizerState& optimizer) const {
    return slots_[static_cast<size_t>(optimizer.index)];
  }
  void update_slots(OptimizerState& optimizer);
  void decide_who_scales();
  void step_scaled(OptimizerState& optimizer, const std::vector<SlotList>& lists);
  /// The deferred factor of all gradients of unsharded models. Applies it if it is not the same for
  /// all, or if a list is part of a model.
  double common_factor(const std::vector<SlotList>& lists);
  void note_done(std::function<void()> again, int64_t optimizer = -1);
  const std::vector<std::shared_ptr<OptimizerState>>& watched(
      const SchedulerState& scheduler) const;

  Gathered gradients_of(const std::vector<SlotList>& lists);
  DeviceScalar norm_of(const std::vector<SlotList>& lists, const Gathered& all, double norm_type);
  /// The names and norms of the gradients, in order of registration.
  GradientNorms norms_in_order(const SlotList& list, double p) const;
  [[noreturn]] void refuse_non_finite(const std::vector<SlotList>& lists, const char* where,
                                      double norm) const;

  OpenBatch& batch_;
  std::vector<std::shared_ptr<OptimizerState>> optimizers_;
  std::vector<std::vector<SlotList>> slots_; // [optimizer]
  std::vector<std::shared_ptr<SchedulerState>> schedulers_;
  std::vector<Done> done_; // calls for the last complete window, in order
};

} // namespace hasten::detail
