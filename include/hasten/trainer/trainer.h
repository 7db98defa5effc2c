// The training loop for any torch::nn::Module: epochs, accumulation, AdamW with two decay groups, a
// schedule, clipping, records, evaluation, saving.
// Threading: one Trainer per thread. Lifetime: shares ownership of model and data. Every member
// function is collective: all ranks call it, in the same order. When a rank fails, the others end
// with an error that names it. The step itself: src/trainer/train_step.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "hasten/config/training_arguments.h"
#include "hasten/core/device_scalar.h"
#include "hasten/data/dataset.h"
#include "hasten/trainer/callback.h"
#include "hasten/trainer/evaluation_metrics.h"
#include "hasten/trainer/trainer_state.h"

namespace hasten {

class Accelerator;
struct AcceleratorOptions;
struct OptimizerSettings;

/// What a loss function returns for one micro-batch. The Trainer normalises: the loss of an
/// optimizer step is the sum of loss_sum divided by the sum of weight, over all its micro-batches on
/// all ranks.
struct LossOutput {
  /// Sum (not mean) of the loss over the batch's items; 0-d, with its graph. May be undefined, with
  /// weight 0, for a batch without labels; then only predict() can use the batch.
  at::Tensor loss_sum{};
  /// Number of items in the sum: samples, or tokens that have a label. >= 0. A number, or
  /// DeviceScalar(count) for a count on the device, which is read when it is used.
  DeviceScalar weight = 0;
  /// Input of metrics and predict(), for example logits; dimension 0 is the sample.
  at::Tensor outputs{};
};

/// Runs the model on a batch, which is on the device. Called in training mode with gradients, in
/// evaluation mode without. Never called with 0 samples.
using LossFunction = std::function<LossOutput(const Batch&)>;

/// How a model is saved and loaded.
struct ModelFiles {
  /// Writes the model into an existing, empty folder. Rank 0 calls it.
  std::function<void(const std::filesystem::path&)> save{};
  /// Reads it into the same module. Rank 0 calls it and broadcasts parameters and buffers.
  std::function<void(const std::filesystem::path&)> load{};
};

/// model.safetensors with the names of named_parameters() and named_buffers(), tied tensors once.
/// The Trainer's default.
ModelFiles default_model_files(std::shared_ptr<torch::nn::Module> model);

/// The options of the accelerator (without mixed_precision), of the optimizer that
/// spelling(arguments.optim) names, and the description of a run, all from the arguments. The
/// description lacks what only the run knows: samples, device, threads, notes.
AcceleratorOptions accelerator_options(const TrainingArguments& arguments);
OptimizerSettings optimizer_settings(const TrainingArguments& arguments);
RunDescription describe_run(const TrainingArguments& arguments, const TrainingPlan& plan,
                            const torch::nn::Module& model, int world_size);

struct TrainOutput {
  int64_t global_step = 0;
  /// Mean per sample over the whole run.
  double training_loss = 0;
  /// The final record: train_runtime (s), train_samples_per_second,
  /// train_steps_per_second, train_loss, epoch.
  nlohmann::json metrics{};
  /// output_dir already held the finished run; nothing was done.
  bool already_finished = false;
};

struct PredictionOutput {
  /// The loss function's outputs, samples in the dataset's order, on the CPU, on every rank.
  at::Tensor outputs{};
  /// Named test_…; without test_loss if the batches have no labels.
  nlohmann::json metrics{};
};

/// The model of a Trainer: a ModuleHolder or a shared_ptr. A model whose forward(const Batch&)
/// returns a LossOutput needs no loss function, as models of transformers do.
class TrainerModel {
 public:
  template <typename Holder>
    requires(!std::same_as<std::remove_cvref_t<Holder>, TrainerModel>)
  TrainerModel(const Holder& holder) {
    if constexpr (requires { holder.ptr(); }) {
      module = holder.ptr();
    } else {
      module = holder;
    }
    if constexpr (requires(Holder& own, const Batch& batch) {
                    { own->forward(batch) } -> std::convertible_to<LossOutput>;
                  }) {
      loss_function = [own = holder](const Batch& batch) mutable { return own->forward(batch); };
    }
  }

  std::shared_ptr<torch::nn::Module> module{};
  LossFunction loss_function{};
};

/// What a Trainer works on, with the names of transformers' Trainer:
/// Trainer trainer({.model = net, .args = arguments, .train_dataset = train});
struct TrainerParameters {
  TrainerModel model;
  TrainingArguments args{};
  /// Without it only evaluate() and predict() work.
  std::shared_ptr<const Dataset> train_dataset{};
  std::shared_ptr<const Dataset> eval_dataset{};
  ComputeMetrics compute_metrics{};
  /// Empty: the model returns its loss.
  LossFunction compute_loss_func{};
  std::vector<std::shared_ptr<TrainerCallback>> callbacks{};
  /// Made from the environment if absent; see below.
  std::shared_ptr<Accelerator> accelerator{};
};

class Trainer {
 public:
  /// The constructor below, with named parameters. Throws InputError, too, for a model that
  /// returns no loss, without compute_loss_func.
  explicit Trainer(TrainerParameters parameters);
  /// `loss_function` captures the model. Without `train` only evaluate() and predict() work.
  /// `accelerator` is made from the environment if absent; a given one must have
  /// arguments.gradient_accumulation_steps. Call accelerator().end_training() at the end of the
  /// program to close its group. A ProgressCallback shows the run on rank 0, unless
  /// arguments.disable_tqdm.
  /// Collective if it makes the accelerator. Throws InputError for arguments out of range and for
  /// load_best_model_at_end without evaluation data.
  Trainer(std::shared_ptr<torch::nn::Module> model, LossFunction loss_function,
          TrainingArguments arguments, std::shared_ptr<const Dataset> train = nullptr,
          std::shared_ptr<const Dataset> eval = nullptr, ComputeMetrics compute_metrics = {},
          std::shared_ptr<Accelerator> accelerator = nullptr);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Call it before train().
  void set_model_files(ModelFiles files);
  /// With a `state_name`, equal on every rank, the callback must be a Stateful, and its state is
  /// saved in checkpoints; otherwise throws InputError. A ProgressCallback replaces the existing
  /// one on rank 0; other ranks ignore it, and every TrackerCallback.
  void add_callback(std::shared_ptr<TrainerCallback> callback, const std::string& state_name = {});
  /// Further facts that the run depends on, as JSON objects of names and values. If a fact differs
  /// when the run is resumed, a `listed` one is printed, and an `altering` one is an error, like a
  /// changed argument ("train_data", a checksum of samples and lengths, is added unless given).
  /// Rank 0's values are used; other ranks may pass empty objects. Call it before train().
  void set_run_facts(nlohmann::json listed, nlohmann::json altering);

  /// Runs the training, or the rest of it. With resume_from_checkpoint it continues as if it had
  /// not been interrupted: bit for bit with the same world size, and with another one each sample
  /// of the epoch is used exactly once. Leaves the final model (the best one with
  /// load_best_model_at_end) in output_dir and in the module. At the last step there is always a
  /// training record, and an evaluation and a save unless their strategy is no.
  /// Throws InputError before anything is written (output_dir holds another run, more processes
  /// than samples, a damaged checkpoint, changed arguments). Throws TrainingError for a loss or
  /// gradient that is not finite, naming step and rank, before the parameters change. Throws
  /// Interrupted after a signal (base/process.h).
  TrainOutput train();

  /// Evaluates every sample exactly once, for any world size. Returns loss, metrics and times, as
  /// prefix_loss, prefix_<metric>, prefix_runtime (s), prefix_samples_per_second,
  /// prefix_steps_per_second.
  nlohmann::json evaluate(const Dataset& dataset, const std::string& prefix = "eval");
  /// Evaluates the evaluation data. Throws InputError if there is none.
  nlohmann::json evaluate();

  /// EvaluationMetrics::report() of the last evaluation, equal on every rank; null before the first.
  const nlohmann::json& evaluation_report() const;

  /// Rank 0 writes `metrics` to output_dir/train_results.json, where "train" is `split` (or eval,
  /// test, all). With `combined` it adds their numbers and texts to output_dir/all_results.json.
  /// Like transformers' save_metrics. Local; other ranks do nothing. Throws Error if a file cannot
  /// be written.
  void save_metrics(const std::string& split, const nlohmann::json& metrics, bool combined = true);

  /// Memory: the outputs of all samples, on every rank.
  PredictionOutput predict(const Dataset& dataset);

  const TrainingArguments& arguments() const;
  const TrainerState& state() const;
  Accelerator& accelerator();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace hasten
