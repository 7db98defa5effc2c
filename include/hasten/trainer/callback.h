// What a run tells whoever watches it (console output, a progress bar, a tracker),
// and what these may ask of it. What a run prints is a callback's doing too:
// hasten/trainer/progress_callback.h.
// Threading: called on the thread that trains. Every callback is called on
// every rank, in the same order and with the same values (sums, means and
// maxima over ranks): print where Accelerator::is_main_process(). A callback
// must not communicate; what it throws ends the run on all ranks.
//
// The order of events, as in transformers:
//   on_train_begin
//     on_epoch_begin
//       on_step_begin               an update begins
//         on_substep_end            behind each micro-batch but the update's last
//       on_pre_optimizer_step       gradients are final and clipped
//       on_optimizer_step           the parameters have changed
//       on_step_end                 the update is counted
//       on_log                      where a record is due
//       on_prediction_step …, on_evaluate       where an evaluation is due
//       on_save                     where a save is due
//     on_epoch_end                  the epoch's report, after all of that
//   on_train_end
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/trainer/training_plan.h"

namespace hasten {

/// What a run is about to do: the start banner's lines.
struct RunDescription {
  int64_t train_rows = 0;
  /// 0 without evaluation data.
  int64_t eval_rows = 0;
  int world_size = 1;
  /// Threads of this rank's tensor operations.
  int threads = 1;
  /// Rows of one micro-batch on one rank; micro-batches of one update; rows of
  /// one update over all ranks.
  int64_t batch_per_rank = 0;
  int64_t gradient_accumulation_steps = 1;
  int64_t total_batch = 0;
  /// Updates between two averages of Local SGD; 0 where it is not used.
  int64_t local_sgd_steps = 0;
  TrainingPlan plan{};
  /// Numbers in all parameters, tied ones once; in those that are trained; in
  /// those that weight decay applies to.
  int64_t parameters = 0;
  int64_t trainable_parameters = 0;
  int64_t decayed_parameters = 0;
  std::string device{};
  /// fp32, bf16 or fp16.
  std::string precision{};
  /// Empty where nothing is written.
  std::filesystem::path output_dir{};
  std::filesystem::path metrics_file{};
  /// Updates done before, by the run this one goes on with.
  int64_t resumed_step = 0;
  /// What there is to say about how it began: what it resumes from, what was
  /// passed over and why, arguments that have changed.
  std::vector<std::string> notes{};
  /// As they are in force: batch size and precision are those that were chosen.
  TrainingArguments arguments{};
};

/// Where a run stands, after each update. Local counts, no communication.
struct StepProgress {
  int64_t global_step = 0;
  int64_t max_steps = 0;
  /// Epochs done, as a fraction: 1.5 is half-way through the second.
  double epoch = 0;
  /// Estimate from the time taken so far, evaluations and saves included.
  double seconds_left = 0;
};

/// An epoch that has ended (evaluation and saving included), or the begun one
/// at which the run ended.
struct EpochReport {
  /// Counted from 1, of `epochs`.
  int64_t epoch = 0;
  int64_t epochs = 0;
  int64_t global_step = 0;
  /// Per sample (per unit of the loss's weight), over this epoch's updates.
  double training_loss = 0;
  /// This epoch's last evaluation: eval_loss, eval_accuracy, eval_f1, …, by
  /// name; empty where there was none.
  std::map<std::string, double> evaluation{};
  /// Rows trained on, over all ranks, and their rate. Seconds of training only.
  int64_t samples = 0;
  double train_seconds = 0;
  double samples_per_second = 0;
  /// Tokens a second over all ranks, without and with padding; 0 for batches
  /// without attention_mask.
  double tokens_per_second = 0;
  double padded_tokens_per_second = 0;
  /// Share of computed tokens that were padding, 0 to 1.
  double padding_waste = 0;
  /// Largest of any rank since the run began: bytes in CPU tensors (0 without
  /// install_memory_meter()) and resident bytes (VmHWM) of the process.
  int64_t peak_tensor_bytes = 0;
  int64_t peak_resident_bytes = 0;
  /// Estimate for the rest of the run.
  double seconds_left = 0;
};

/// What a callback asks of the run; transformers' TrainerControl. Read, and set back,
/// behind each event.
struct TrainerControl {
  /// Training ends behind this update, with a record and whatever evaluation and save
  /// the strategies give the last update. In on_train_begin: before the first.
  bool should_training_stop = false;
  /// Once, behind this update, whatever the strategies say: a save needs an output_dir
  /// (else it is passed over), an evaluation data to evaluate on.
  bool should_save = false;
  bool should_evaluate = false;
  bool should_log = false;
  /// The peak learning rate from the next update on, >= 0: the schedule's multiplier
  /// is applied to it. Part of checkpoints. Must be set on all ranks alike.
  std::optional<double> learning_rate{};
  /// This rank alone may have decided it (by a clock, by a file it found): what it
  /// asks reaches all ranks with the next update, at no cost, and is done behind that
  /// one. False: every rank asks the same here, and it is done behind this update.
  /// Always so for what a callback asks that is not on every rank, and in the events
  /// from on_step_begin to on_optimizer_step, which a rank without a row in an epoch's
  /// last update does not have. With Local SGD it is done at the next round.
  bool any_rank = false;
};

/// One that is a Stateful too and was added under a name is part of checkpoints.
class TrainerCallback {
 public:
  virtual ~TrainerCallback() = default;
  virtual void on_train_begin(const RunDescription&) {}
  virtual void on_epoch_begin(const StepProgress&) {}
  /// Progress of these four is that of the update before.
  virtual void on_step_begin(const StepProgress&) {}
  virtual void on_substep_end(const StepProgress&) {}
  virtual void on_pre_optimizer_step(const StepProgress&) {}
  virtual void on_optimizer_step(const StepProgress&) {}
  virtual void on_step_end(const StepProgress&) {}
  /// A training record: loss, grad_norm, learning_rate, epoch, step.
  virtual void on_log(const nlohmann::json&) {}
  /// Batches of the evaluation under way: done of total, on this rank. The one
  /// call whose values may differ between ranks.
  virtual void on_prediction_step(int64_t done, int64_t total) {
    (void)done;
    (void)total;
  }
  /// An evaluation record: eval_loss, …, eval_runtime, epoch, step.
  virtual void on_evaluate(const nlohmann::json&) {}
  /// Trainer::predict's record: test_loss, ….
  virtual void on_predict(const nlohmann::json&) {}
  /// A checkpoint-N folder that is complete.
  virtual void on_save(const std::filesystem::path&) {}
  virtual void on_epoch_end(const EpochReport&) {}
  /// The final record: train_runtime, train_loss, ….
  virtual void on_train_end(const nlohmann::json&) {}

  /// For the callback itself, in its events: control().should_save = true.
  TrainerControl& control() { return control_; }

 private:
  TrainerControl control_{};
};

} // namespace hasten
