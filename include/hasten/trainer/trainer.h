// The training loop for any torch::nn::Module: epochs, accumulation, AdamW with
// two decay groups, a schedule, clipping, records, evaluation, saving.
// Threading: one Trainer per thread. Lifetime: shares ownership of model and
// data. Every member function is collective: all ranks call it, in the same
// order. When a rank fails, the others end with an error that names it.
// Reads as the theory: src/trainer/train_step.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/data/dataset.h"
#include "hasten/trainer/callback.h"
#include "hasten/trainer/evaluation_metrics.h"
#include "hasten/trainer/trainer_state.h"
#include "hasten/trainer/training_arguments.h"

namespace hasten {

class Accelerator;
struct AcceleratorOptions;
struct OptimizerSettings;

/// What a loss function says about one micro-batch. The Trainer does all
/// normalisation: the loss of an update is the sum of loss_sum over the sum of
/// weight, over all its micro-batches on all ranks.
struct LossOutput {
  /// Sum (not mean) of the loss over the batch's items; 0-d, with its graph.
  /// May be undefined, with weight 0, for a batch without labels: then only
  /// predict() can use it.
  at::Tensor loss_sum{};
  /// Items in the sum: rows, or tokens that have a label. >= 0.
  double weight = 0;
  /// What metrics and predict() read, dim 0 the row: logits.
  at::Tensor outputs{};
};

/// Runs the model on a batch that lies on the device. Called in training mode
/// with gradients, in evaluation mode without. Never called with 0 rows.
using LossFunction = std::function<LossOutput(const Batch&)>;

/// How a model becomes files and back.
struct ModelFiles {
  /// Writes the model into an existing, empty folder. Rank 0 calls it.
  std::function<void(const std::filesystem::path&)> save{};
  /// Reads it from there into the same module. Rank 0 calls it; the others get
  /// its parameters and buffers.
  std::function<void(const std::filesystem::path&)> load{};
};

/// model.safetensors with the names of named_parameters() and named_buffers(),
/// tied tensors once. What a Trainer uses unless it is told otherwise.
ModelFiles default_model_files(std::shared_ptr<torch::nn::Module> model);

/// What the arguments say of an accelerator, but for mixed_precision; of the optimizer
/// that spelling(arguments.optim) names; and of a run of this plan. A description lacks
/// what the run alone knows: rows, device, threads, and how it began.
AcceleratorOptions accelerator_options(const TrainingArguments& arguments);
OptimizerSettings optimizer_settings(const TrainingArguments& arguments);
RunDescription describe_run(const TrainingArguments& arguments, const TrainingPlan& plan,
                            const torch::nn::Module& model, int world_size);

struct TrainOutput {
  int64_t global_step = 0;
  /// Per sample, over the whole run.
  double training_loss = 0;
  /// The final record: train_runtime (s), train_samples_per_second,
  /// train_steps_per_second, train_loss, epoch.
  nlohmann::json metrics{};
  /// output_dir held the finished run already: nothing was done.
  bool already_finished = false;
};

struct PredictionOutput {
  /// What the loss function returned, rows in the dataset's order, on the CPU,
  /// on every rank.
  at::Tensor outputs{};
  /// Named test_…; without test_loss where the batches have no labels.
  nlohmann::json metrics{};
};

class Trainer {
 public:
  /// `loss_function` holds the model by itself. Without `train` only evaluate()
  /// and predict() work. `accelerator` is made from the environment if absent;
  /// a given one must have arguments.gradient_accumulation_steps.
  /// accelerator().end_training() at the end of the program closes its group.
  /// What it does is shown by a ProgressCallback on rank 0, unless
  /// arguments.disable_tqdm.
  /// Collective where it makes the accelerator. Throws InputError: arguments
  /// out of range, load_best_model_at_end without evaluation data.
  Trainer(std::shared_ptr<torch::nn::Module> model, LossFunction loss_function,
          TrainingArguments arguments, std::shared_ptr<const Dataset> train = nullptr,
          std::shared_ptr<const Dataset> eval = nullptr, ComputeMetrics compute_metrics = {},
          std::shared_ptr<Accelerator> accelerator = nullptr);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Before train().
  void set_model_files(ModelFiles files);
  /// With a `state_name`, the same on every rank, the callback is a Stateful and
  /// its state is part of checkpoints. Throws InputError where it is none.
  /// A ProgressCallback takes the place of the one there is, on rank 0; other ranks
  /// leave it out.
  void add_callback(std::shared_ptr<TrainerCallback> callback, std::string state_name = {});
  /// What the run depends on beside the arguments, as JSON objects of name and
  /// value: where one differs when the run is resumed it is listed (`listed`), or
  /// refused as a changed argument is (`altering`; "train_data", a checksum of
  /// rows and lengths, is in there unless given). Those of rank 0 count, the others
  /// may be empty. Before train().
  void set_run_facts(nlohmann::json listed, nlohmann::json altering);

  /// The whole run, or the rest of it: with resume_from_checkpoint it goes on as
  /// if it had not been interrupted, bit for bit at the same world size, and on
  /// any other sees each row of the epoch once. Leaves the final model (the best one with
  /// load_best_model_at_end) in output_dir and in the module.
  /// At the last update there is always a training record, and an evaluation
  /// and a save unless their strategy is no.
  /// Throws InputError before anything is written (output_dir holds another
  /// run, more processes than rows, a damaged checkpoint, changed arguments),
  /// TrainingError for a loss or gradient that
  /// is not finite, naming update and rank, before the parameters change;
  /// Interrupted when a signal was remembered (base/process.h).
  TrainOutput train();

  /// Every row exactly once, on any world: loss, `compute_metrics`, times.
  /// Keys: prefix_loss, prefix_<metric>, prefix_runtime (s),
  /// prefix_samples_per_second, prefix_steps_per_second.
  nlohmann::json evaluate(const Dataset& dataset, const std::string& prefix = "eval");
  /// Of the evaluation data. Throws InputError where there is none.
  nlohmann::json evaluate();

  /// Memory: the outputs of all rows, on every rank.
  PredictionOutput predict(const Dataset& dataset);

  const TrainingArguments& arguments() const;
  const TrainerState& state() const;
  Accelerator& accelerator();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace hasten
