// One micro-batch of the training loop, and the checks of an optimizer step's gradients.
#pragma once

#include "hasten/data/loader.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/optim/schedule.h"
#include "run_control.h"
#include "trainer_parts.h"

namespace hasten::detail {

/// Throws InputError unless it can be trained on.
void require_loss(const LossOutput& loss);

class TrainStep {
 public:
  /// What prepare() returned, in whose order.
  struct Handles {
    PreparedOptimizer<torch::optim::Optimizer> optimizer;
    PreparedLoader<DataLoader> loader;
    PreparedScheduler<LRScheduler> scheduler;
  };
  TrainStep(TrainerParts& parts, const TrainingPlan& plan, RunControl& control, Handles handles);

  /// The loop's range.
  PreparedLoader<DataLoader>& loader() { return handles_.loader; }
  const PreparedLoader<DataLoader>& loader() const { return handles_.loader; }
  /// Steps it after each optimizer step. Null: plain training.
  void set_local_sgd(LocalSGD* local_sgd) { local_sgd_ = local_sgd; }

  /// Forward and backward, and the optimizer's step at the end of a window; true if it
  /// was made. `before`: progress before the optimizer step.
  bool run(const Batch& batch, const StepProgress& before);
  /// An optimizer step was counted that this rank had no batch for, or had (`stepped`).
  void counted(bool stepped);

  /// Losses are multiplied by a loss scale: fp16.
  bool scales_losses() const;
  /// Optimizer steps left out since the start of this process.
  int64_t overflows() const { return overflows_; }
  /// Before clipping; NaN if this rank had no batch.
  double grad_norm() const { return grad_norm_; }
  /// Of an optimizer step with a record, if the arguments ask for them.
  const GradientNorms& gradient_norms() const { return gradient_norms_; }
  bool record_due(int64_t global_step) const {
    return global_step % plan_.logging_steps == 0 || global_step >= plan_.max_steps;
  }

 private:
  [[noreturn]] void stop_at_loss();
  [[noreturn]] void stop_at_gradient() const;
  void clip_gradients();
  void note_gradient_norms();
  void note_overflow();
  bool is_local() const { return local_sgd_ != nullptr && local_sgd_->active(); }

  TrainerParts& parts_;
  const TrainingPlan& plan_;
  RunControl& control_;
  Handles handles_;
  LocalSGD* local_sgd_ = nullptr;
  at::Tensor window_loss_; // this rank's, on the device; read only on failure
  bool window_open_ = false; // between on_step_begin and on_step_end
  int64_t overflows_ = 0;
  double grad_norm_ = 0;
  GradientNorms gradient_norms_{};
};

} // namespace hasten::detail
