// One micro-batch of the training loop, and the checks of an optimizer step's gradients.
#pragma once

#include <iterator>
#include <optional>
#include <vector>

#include "hasten/core/device_scalar.h"
#include "hasten/data/loader.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/optim/schedule.h"
#include "loss_graphs.h"
#include "trainer_parts.h"

namespace hasten::detail {

class RunControl;

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
  /// An optimizer step was counted, numbered `step`. `window`: its report.
  void counted(int64_t step, const WindowReport& window);
  /// The windows counted since the last call. Waits for the device, once. Throws TrainingError for
  /// the first step whose loss or gradient is not finite. Collective unless windows are local.
  std::vector<WindowReport> take_windows();
  /// Number of windows that take_windows() will return.
  int64_t pending_steps() const { return std::ssize(pending_steps_); }

  /// Losses are multiplied by a loss scale: fp16.
  bool scales_losses() const;
  /// Optimizer steps left out since the start of this process.
  int64_t overflows() const { return overflows_; }
  /// Before clipping; NaN if this rank had no batch.
  const DeviceScalar& grad_norm() const { return grad_norm_; }
  /// Of an optimizer step with a record, if the arguments ask for them.
  const GradientNorms& gradient_norms() const { return gradient_norms_; }
  bool record_due(int64_t global_step) const {
    return global_step % plan_.logging_steps == 0 || global_step >= plan_.max_steps;
  }

 private:
  /// A step whose values may be on the device still.
  struct PendingStep {
    int64_t step;
    WindowReport window;
    DeviceScalar own_loss; // this rank's sum
    DeviceScalar grad_norm; // 0: none, or checked
  };
  bool reads_at_once() const { return parts_.accelerator->device().is_cpu() || scales_losses(); }
  void check_loss(); // of the window that is complete
  void check_loss(const PendingStep& of);
  void leave_out_if_not_finite();
  [[noreturn]] void stop_at_loss(int64_t step, double own_loss);
  [[noreturn]] void stop_at_gradient(int64_t step, std::optional<double> earlier = {}) const;
  void meet_before_stopping() const;
  void clip_gradients();
  void note_gradient_norms();
  void note_overflow();
  bool is_local() const { return local_sgd_ != nullptr && local_sgd_->active(); }

  TrainerParts& parts_;
  const TrainingPlan& plan_;
  RunControl& control_;
  Handles handles_;
  std::optional<LossGraphs> graphs_{};
  LocalSGD* local_sgd_ = nullptr;
  at::Tensor window_loss_{}; // this rank's sum, on the device; read only on failure
  // fp32 [1] on a device: 1 as soon as a loss or norm was not finite. The optimizer then leaves the
  // parameters as they are, until take_windows() throws.
  at::Tensor found_inf_{}, one_{};
  std::vector<PendingStep> pending_steps_{};
  bool window_open_ = false; // between on_step_begin and on_step_end
  int64_t overflows_ = 0;
  DeviceScalar grad_norm_{};
  DeviceScalar unchecked_norm_{}; // take_windows() checks it
  GradientNorms gradient_norms_{};
};

} // namespace hasten::detail
