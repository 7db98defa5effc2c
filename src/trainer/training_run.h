// One call of Trainer::train(): all objects of a run.
#pragma once

#include <chrono>
#include <map>
#include <string>

#include "hasten/data/loader.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/optim/make_optimizer.h"
#include "hasten/optim/plateau.h"
#include "hasten/optim/schedule.h"
#include "hasten/tracking/tracker.h"
#include "run_control.h"
#include "starting_point.h"
#include "train_step.h"

namespace hasten::detail {

/// Seconds since it was made or restarted.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  void restart() { start_ = Clock::now(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

/// Seconds of the training thread since the last record, by what it did. Evaluations, records and
/// callbacks between the steps are in none of them. They are the host's times.
struct StepSeconds {
  double compute = 0;
  double recompute = 0;
  double communication = 0; // waiting in collectives, for slower ranks, too
  double data = 0; // waiting for batches
  double save = 0;
  int64_t steps = 0;

  /// Adds the time since the last call to `part`, without recomputing and waiting in collectives.
  /// Null: only starts anew.
  void lap(double* part);

 private:
  Stopwatch time_{};
  double waited_ = 0;
  double recomputed_ = 0;
};

/// Loss over several steps and all ranks: the sum of the windows' reports.
struct LossTotal {
  double loss_sum = 0;
  double weight = 0;
  void add(const WindowReport& window) {
    loss_sum += window.loss * window.weight;
    weight += window.weight;
  }
  double mean() const { return loss_sum / weight; } // NaN if there are no steps
};

struct TokenCount {
  int64_t real = 0;
  int64_t padded = 0;
};

/// What a checkpoint keeps of a run's progress, in addition to TrainerState.
struct RunProgress {
  int64_t epoch_index = 0; // of the current one, from 0
  bool epoch_ended = false; // but not reported yet
  LossTotal since_record{};
  LossTotal of_epoch{};
  LossTotal of_run{};
  int64_t samples = 0; // of the run, over all ranks
  int64_t samples_before_epoch = 0;
  TokenCount tokens{}; // of the run, over all ranks
  TokenCount tokens_before_epoch{};
  std::map<std::string, double> epoch_evaluation{};
  double seconds_not_training = 0; // in evaluations and saves; saved as "seconds_aside"
  double seconds_trained_before_epoch = 0;
  int64_t last_evaluated_step = -1;
};

/// Options of the training loader. Steps are equal for equal values of
/// per_device_train_batch_size * gradient_accumulation_steps * world_size.
LoaderOptions train_loader_options(const TrainingArguments& arguments, int world_size,
                                   int64_t drop_batch = 0);

/// With auto_find_batch_size: lowers the arguments' batch size until a step on the longest samples
/// fits, and raises the accumulation. `first`: the size to try first. Collective.
void find_batch_size(TrainerParts& parts, int64_t first);

/// The samples that need the most memory in one batch: the `count` longest.
std::vector<int64_t> longest_rows(const Dataset& data, int64_t count);

class TrainingRun;

/// The accelerator's reference to a run; empty after the run's destruction.
class RunReference final : public Stateful {
 public:
  explicit RunReference(TrainingRun* run) : run_(run) {}
  void detach() { run_ = nullptr; }
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  TrainingRun* run_;
};

class TrainingRun {
 public:
  TrainingRun(TrainerParts& parts, const TrainingPlan& plan, StartingPoint start);
  ~TrainingRun() { run_reference_->detach(); }
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;
  /// Save and restore counts, sums and records.
  nlohmann::json saved_progress() const;
  void restore(const nlohmann::json& values);
  /// Collective. If it throws, the run ends on all ranks.
  TrainOutput run();
  /// True if run() ended, after a save, because of SIGTERM; equal on all ranks.
  bool terminated() const { return terminated_; }

 private:
  // training_run.cpp
  void begin();
  void run_epoch();
  void count_step();
  /// Adds the losses of the steps since the last call. Waits for the device, and throws for a step
  /// whose loss or gradient is not finite.
  void take_losses();
  /// Training record, evaluation and save, as they are due.
  void after_step(bool epoch_ended);
  void end_epoch();
  TrainOutput finish();
  RunDescription describe() const;
  double seconds_left() const;
  double seconds_trained() const;
  /// Includes the time before the run was resumed.
  double run_seconds() const { return run_seconds_before_ + run_time_.seconds(); }
  int64_t epochs_last_step(int64_t epoch) const {
    return (epoch + 1) * plan_.steps_per_epoch - plan_.step_shift;
  }

  StepProgress step_progress() const;
  /// Saves after the optimizer step; all ranks then end. Collective.
  void terminate();

  // run_records.cpp
  void log_training();
  void evaluate_and_log();
  /// Steps the plateau schedule with the metric of an evaluation's record.
  void step_plateau(const nlohmann::json& record);
  /// Whether the model must be saved because it is the best so far (save_strategy=best).
  bool consider_best(const nlohmann::json& record, bool will_be_saved);
  void append_record(const char* type, const nlohmann::json& record);
  /// Sums tokens over ranks. Collective.
  void collect_tokens();
  /// take_losses(). With Local SGD: sums losses and samples over ranks. Collective.
  void collect_losses();
  /// Adds the norms by name to a training record. With Local SGD collective.
  void describe_gradient_norms(nlohmann::json& record);
  /// Speed and times of a step since the last record, for metrics.jsonl alone: they differ in each
  /// run.
  nlohmann::json take_speed();
  /// Adds Local SGD's report to a training record.
  void describe_rounds(nlohmann::json& record);
  void load_best();
  void register_states();
  void load_checkpoint();
  void open_output_dir();
  nlohmann::json run_json(bool finished) const;
  void write_model_folder(const std::filesystem::path& folder, bool finished) const;
  void save_checkpoint();
  void save_final();

  /// After post_local_start steps. Collective.
  void open_local_sgd(int64_t steps);
  bool is_local() const { return local_sgd_ && local_sgd_->active(); }
  bool last_step() const { return control_.stopping() || state_.global_step >= plan_.max_steps; }

  TrainerParts& parts_;
  TrainerState& state_;
  const TrainingPlan plan_;
  const StartingPoint start_;
  const std::shared_ptr<RunReference> run_reference_;
  const std::filesystem::path output_dir_;

  // The handles below refer to these, so they come first.
  std::vector<torch::optim::OptimizerParamGroup> groups_;
  RunDescription description_{}; // made before the model is sharded
  bool blocks_looked_for_ = false; // whether gradient checkpointing has been checked for blocks
  std::shared_ptr<torch::optim::Optimizer> torch_optimizer_;
  std::shared_ptr<LRScheduler> lr_scheduler_;
  RunControl control_;
  std::shared_ptr<ReduceLrOnPlateau> plateau_{}; // may be null; with it lr_scheduler_ is constant
  std::shared_ptr<DataLoader> data_loader_;
  std::optional<TrainStep> step_{}; // once prepared
  std::optional<LocalSGD> local_sgd_{}; // empty, or not active: plain training

  RunProgress progress_{};

  // The step under way, or the one just done.
  LossTotal uncollected_losses_{}; // Local SGD: this rank's alone
  int64_t uncollected_rows_ = 0;
  double mean_grad_norm_ = 0; // Local SGD: over the ranks
  double round_seconds_ = 0; // the same
  double communication_share_ = 0; // the same

  TokenCount uncollected_{}; // this rank's since the last collection
  int64_t bytes_sent_before_ = 0; // by this process, before the run
  Stopwatch run_time_{};
  double run_seconds_before_ = 0;
  WorkTime evaluations_{}; // by this process, as the saves
  WorkTime saves_{};
  StepSeconds step_seconds_{}; // since the last record
  double seconds_at_record_ = 0; // of seconds_trained()
  int64_t samples_at_record_ = 0;
  int64_t last_saved_step_ = -1;
  int64_t last_logged_step_ = -1;

  bool terminated_ = false;
  std::shared_ptr<GeneralTracker> metrics_{}; // metrics.jsonl; null except on rank 0
};

} // namespace hasten::detail
