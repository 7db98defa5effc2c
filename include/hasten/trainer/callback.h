// Callbacks observe a run (console output, a progress bar, a tracker) and can control it. The run's
// own output is a callback, too: hasten/trainer/progress_callback.h.
// Threading: called on the thread that trains. Every callback is called on every rank, in the same
// order and with the same values (sums, means and maxima over ranks), so print only if
// Accelerator::is_main_process(). A callback must not communicate. If it throws, the run ends on
// all ranks.
//
// The order of events, as in transformers but for the first:
//   on_precision
//   on_train_begin
//     on_epoch_begin
//       on_step_begin               an optimizer step begins
//         on_substep_end            after each micro-batch but the step's last
//       on_pre_optimizer_step       gradients are final and clipped
//       on_optimizer_step           the parameters have changed
//       on_step_end                 global_step counts the step
//       on_log                      if a record is due
//       on_prediction_step …, on_evaluate       if an evaluation is due
//       on_save                     if a save is due
//     on_epoch_end                  after all of these, with the epoch's report
//   on_train_end
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/config/training_plan.h"

namespace hasten {

/// What a run will do: the lines of the start banner.
struct RunDescription {
  int64_t train_rows = 0;
  /// 0 without evaluation data.
  int64_t eval_rows = 0;
  int world_size = 1;
  /// Threads of this rank's tensor operations.
  int threads = 1;
  /// Samples of one micro-batch on one rank; micro-batches of one step; samples of one step
  /// over all ranks.
  int64_t batch_per_rank = 0;
  int64_t gradient_accumulation_steps = 1;
  int64_t total_batch = 0;
  /// Steps between two synchronisations of Local SGD; 0 without Local SGD.
  int64_t local_sgd_steps = 0;
  TrainingPlan plan{};
  /// Elements of all parameters, tied ones once; of the trained ones; of those that weight decay
  /// applies to.
  int64_t parameters = 0;
  int64_t trainable_parameters = 0;
  int64_t decayed_parameters = 0;
  std::string device{};
  /// fp32, bf16 or fp16.
  std::string precision{};
  /// Empty if nothing is written.
  std::filesystem::path output_dir{};
  std::filesystem::path metrics_file{};
  /// Steps that the resumed run had done.
  int64_t resumed_step = 0;
  /// Notes on the start: the checkpoint that it resumes from, checkpoints that were skipped and
  /// why, arguments that have changed.
  std::vector<std::string> notes{};
  /// The arguments in effect, with the batch size and precision that were chosen.
  TrainingArguments arguments{};
};

/// Progress of a run, after each step. Local counts, no communication.
struct StepProgress {
  int64_t global_step = 0;
  int64_t max_steps = 0;
  /// Epochs done, as a fraction: 1.5 is half-way through the second.
  double epoch = 0;
  /// Estimate: steps, evaluations and saves that are left, each at its mean time so far. The first
  /// evaluation and save count only once they were measured.
  double seconds_left = 0;
};

/// Report of an epoch that has ended (evaluation and saving included), or of the epoch during which
/// the run ended.
struct EpochReport {
  /// Counted from 1, of `epochs`.
  int64_t epoch = 0;
  int64_t epochs = 0;
  int64_t global_step = 0;
  /// Mean per sample (per unit of the loss's weight) over this epoch's steps.
  double training_loss = 0;
  /// This epoch's last evaluation: eval_loss, eval_accuracy, eval_f1, …, by name; empty if there
  /// was none.
  std::map<std::string, double> evaluation{};
  /// Samples trained on over all ranks, seconds of training (without evaluation and saving), and
  /// the ratio of both.
  int64_t samples = 0;
  double train_seconds = 0;
  double samples_per_second = 0;
  /// Tokens per second over all ranks, without and with padding; 0 for batches without
  /// attention_mask.
  double tokens_per_second = 0;
  double padded_tokens_per_second = 0;
  /// Fraction of computed tokens that were padding, 0 to 1.
  double padding_waste = 0;
  /// Maximum over ranks since the run began: bytes in tensors on the device (on the CPU 0
  /// without install_memory_meter()) and resident bytes (VmHWM) of the process.
  int64_t peak_tensor_bytes = 0;
  int64_t peak_resident_bytes = 0;
  /// Maximum over ranks since this process began the run: bytes that it has sent over the TCP
  /// connections that are still open, such as Gloo's. A store on this host is no TCP connection.
  int64_t bytes_sent = 0;
  /// Estimate for the rest of the run, as in StepProgress.
  double seconds_left = 0;
};

/// Requests of a callback; transformers' TrainerControl. The run reads and resets them after each
/// event.
struct TrainerControl {
  /// Ends training after this step, with a record and, by the strategies, the evaluation and save
  /// of a last step. In on_train_begin: ends it before the first step.
  bool should_training_stop = false;
  /// Done once, after this step, independent of the strategies. A save needs an output_dir and is
  /// ignored without one. An evaluation needs evaluation data.
  bool should_save = false;
  bool should_evaluate = false;
  bool should_log = false;
  /// The peak learning rate from the next step on, >= 0; the schedule's multiplier applies to it.
  /// Saved in checkpoints. Must be set to the same value on all ranks.
  std::optional<double> learning_rate{};
  /// True if only this rank may have made the request (because of a clock or a file). It then
  /// reaches all ranks with the next step at no cost, and is done after that step. False: every
  /// rank makes the same request, and it is done after this step. Requests of callbacks that are
  /// not on every rank are always treated as true. So are requests in the events from on_step_begin
  /// to on_optimizer_step, because a rank without samples in an epoch's last step does not have
  /// these events. With Local SGD they are done at the next synchronisation.
  bool any_rank = false;
};

/// A callback that is a Stateful and was added under a name is saved in checkpoints.
class TrainerCallback {
 public:
  virtual ~TrainerCallback() = default;
  /// At the start of train(): the precision of the forward passes, also if it was automatic. The
  /// model is not distributed yet, so weights can still be converted.
  virtual void on_precision(Precision) {}
  virtual void on_train_begin(const RunDescription&) {}
  virtual void on_epoch_begin(const StepProgress&) {}
  /// These four get the progress of the previous step.
  virtual void on_step_begin(const StepProgress&) {}
  virtual void on_substep_end(const StepProgress&) {}
  virtual void on_pre_optimizer_step(const StepProgress&) {}
  virtual void on_optimizer_step(const StepProgress&) {}
  virtual void on_step_end(const StepProgress&) {}
  /// A training record: loss, grad_norm, learning_rate, epoch, step, samples_per_second, step_seconds.
  virtual void on_log(const nlohmann::json&) {}
  /// Progress of an evaluation on this rank: `done` of `total` batches. Only this call may get
  /// different values on different ranks.
  virtual void on_prediction_step(int64_t done, int64_t total) {
    (void)done;
    (void)total;
  }
  /// An evaluation record: eval_loss, …, eval_runtime, epoch, step.
  virtual void on_evaluate(const nlohmann::json&) {}
  /// Trainer::predict's record: test_loss, ….
  virtual void on_predict(const nlohmann::json&) {}
  /// A checkpoint-N folder is complete.
  virtual void on_save(const std::filesystem::path&) {}
  virtual void on_epoch_end(const EpochReport&) {}
  /// The final record: train_runtime, train_loss, ….
  virtual void on_train_end(const nlohmann::json&) {}

  /// For use by the callback in its events: control().should_save = true.
  TrainerControl& control() { return control_; }

 private:
  TrainerControl control_{};
};

} // namespace hasten
