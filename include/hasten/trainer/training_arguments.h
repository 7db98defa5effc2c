// What a training run may be told. Names and defaults are those of Hugging
// Face's TrainingArguments, except:
//
//   field                    here                      there
//   eval_strategy            epoch                     no
//   save_strategy            epoch                     steps
//   eval_steps               500                       logging_steps (500)
//   logging_steps            0.01, a share of all      500
//                            updates; the last window
//                            is always logged
//   save_total_limit         2                         keeps all
//   train_sampling_strategy  group_by_length           random
//   max_length               128, at most the model's  not an argument
//   local_sgd_steps          0, off                    not an argument
//   precision                fp32                      not an argument: bf16, fp16
//   strategy, shard_size     ddp, 0                    fsdp, deepspeed
//   ddp_timeout              600                       1800
//   heartbeat_timeout        5                         not an argument
//
// Plain data without LibTorch, so that the `hasten` program can bind flags to
// it. Threading: none needed.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/activation_checkpoint/checkpoint_spec.h"
#include "hasten/base/spelling.h"
#include "hasten/base/timeouts.h"
#include "hasten/core/precision.h"
#include "hasten/parallel/strategy.h"

namespace hasten {

/// When something recurring happens. An update is one optimizer step.
enum class IntervalStrategy { no, steps, epoch };
/// How the learning rate goes on after the warm-up; see optim/schedule.h.
enum class SchedulerType {
  linear,
  cosine,
  cosine_with_restarts,
  cosine_with_min_lr,
  polynomial,
  constant,
  constant_with_warmup,
  inverse_sqrt,
  warmup_stable_decay,
  /// Falls where metric_for_best_model has stopped improving: at evaluations.
  reduce_lr_on_plateau,
  one_cycle
};
/// What changes the parameters; the first three are one and the same.
enum class OptimizerType {
  adamw_torch,
  adamw_torch_fused,
  adamw,
  adam,
  sgd,
  adafactor,
  lion,
  lamb
};
/// In which order training sees its rows; see data/loader.h.
enum class SamplingStrategy { random, sequential, group_by_length };

/// Of max_grad_norm; spelt 1, 2 and inf.
enum class GradNormType { l1, l2, inf };
/// What training records have norms of beside the whole gradient's; see
/// accelerator/gradients.h.
enum class LogGradientNorms { no, layer, module, parameter };

template <>
inline constexpr auto kSpellings<IntervalStrategy> = std::array{"no", "steps", "epoch"};
template <>
inline constexpr auto kSpellings<SchedulerType> = std::array{"linear",
                                                             "cosine",
                                                             "cosine_with_restarts",
                                                             "cosine_with_min_lr",
                                                             "polynomial",
                                                             "constant",
                                                             "constant_with_warmup",
                                                             "inverse_sqrt",
                                                             "warmup_stable_decay",
                                                             "reduce_lr_on_plateau",
                                                             "one_cycle"};
template <>
inline constexpr auto kSpellings<OptimizerType> = std::array{
    "adamw_torch", "adamw_torch_fused", "adamw", "adam", "sgd", "adafactor", "lion", "lamb"};
template <>
inline constexpr auto kSpellings<SamplingStrategy> =
    std::array{"random", "sequential", "group_by_length"};
template <>
inline constexpr auto kSpellings<GradNormType> = std::array{"1", "2", "inf"};
template <>
inline constexpr auto kSpellings<LogGradientNorms> =
    std::array{"no", "layer", "module", "parameter"};
template <>
inline constexpr auto kSpellings<Precision> =
    std::array{precision_name(Precision::no), precision_name(Precision::bf16),
               precision_name(Precision::fp16), precision_name(Precision::automatic)};
template <>
inline constexpr auto kSpellings<Strategy> = std::array{
    strategy_name(Strategy::ddp), strategy_name(Strategy::zero1), strategy_name(Strategy::zero2),
    strategy_name(Strategy::fsdp), strategy_name(Strategy::hsdp)};
/// The names of torch's ShardingStrategy, as transformers' --fsdp takes them.
template <>
inline constexpr auto kOtherSpellings<Strategy> =
    std::array{std::pair{"no_shard", Strategy::ddp}, std::pair{"shard_grad_op", Strategy::zero2},
               std::pair{"full_shard", Strategy::fsdp}, std::pair{"hybrid_shard", Strategy::hsdp}};

struct TrainingArguments {
  // Where.

  /// Folder of the final model, checkpoint-N folders and records. Required for
  /// Trainer::train() to write anything; empty writes nothing (and then
  /// save_strategy must be no).
  std::string output_dir{};
  /// Lets train() start in a folder that holds another run: that run's
  /// checkpoint-N folders and records are removed first.
  bool overwrite_output_dir = false;

  /// Where to go on from: empty starts afresh; auto, latest or a checkpoint-N
  /// folder: hasten/trainer/resume.h. Excludes overwrite_output_dir.
  std::string resume_from_checkpoint{};
  /// Goes on although arguments that alter the trajectory are not those the run
  /// was begun with.
  bool allow_changed_arguments = false;

  // How long.

  /// Passes over the training data, > 0; may be fractional.
  double num_train_epochs = 3.0;
  /// Updates altogether; above 0 it overrides num_train_epochs.
  int64_t max_steps = -1;

  // How much at once.

  /// Rows of one micro-batch on one rank, >= 1.
  int64_t per_device_train_batch_size = 8;
  /// Rows of one evaluation batch on one rank, >= 1.
  int64_t per_device_eval_batch_size = 8;
  /// Micro-batches an update adds up, >= 1. An epoch's last window may be
  /// shorter and is weighted by what it really holds.
  int64_t gradient_accumulation_steps = 1;
  /// Halves per_device_train_batch_size until a step on the longest rows fits into
  /// memory on every rank, down to its divisors with gradient_accumulation_steps,
  /// which grows so that an update keeps its rows: then the run is that of the size
  /// found. Costs two forward and backward a size, before training. Not beside
  /// gradient_checkpointing=budget, which fits activations to the batch instead.
  bool auto_find_batch_size = false;
  /// For it: most bytes of CPU tensors in one process, "2GB" or "512MiB", the model
  /// and the optimizer's state included. Empty: nine tenths of what the host has left
  /// at the start, shared by its ranks. A GPU has its own limit.
  std::string memory_limit{};
  /// Less memory for more time, with the same gradients to the bit: what of the
  /// blocks' activations is computed a second time in backward. true (every
  /// block), or "every:2", "ops", "budget:50%", … (checkpoint_spec.h). A budget is
  /// planned on the longest batch before training begins. In JSON also called
  /// activation_checkpointing. A model that has it enabled keeps its own choice.
  GradientCheckpointing gradient_checkpointing{};

  /// Training and evaluation in 16 bits (docs/guides/mixed-precision.md); both is an
  /// error. fp16 scales losses and leaves out updates whose gradients overflow.
  bool bf16 = false;
  bool fp16 = false;
  /// The same in one word: no (fp32, the default: the numbers of a run do not depend
  /// on whose machine it runs), bf16, fp16, or automatic: bf16 where a short probe
  /// finds it 1.3 times as fast on every rank. What was chosen is logged, written to
  /// training_args.json, and kept by a run that goes on.
  Precision precision = Precision::no;

  /// What each process holds of the model: all of it, or a part of the optimizer's
  /// state (zero1), of gradients too (zero2), of parameters too (fsdp; hsdp: among
  /// shard_size processes, copies beside); less memory for the same numbers, see
  /// docs/guides/sharding.md. No effect on one process.
  Strategy strategy = Strategy::ddp;

  /// Of hsdp: processes that hold a copy together, neighbours; a divisor of their
  /// number. 0: those of a host.
  int64_t shard_size = 0;

  /// Above 0: Local SGD. Each process updates its own weights, which are averaged
  /// after this many updates, and before every evaluation and save; gradients do
  /// not travel (hasten/accelerator/local_sgd.h). No effect on one process.
  /// Memory: one more copy of the weights.
  int64_t local_sgd_steps = 0;

  /// Longest wait for a process that lives but is late, and longest until one that
  /// died or froze is named: CommunicatorOptions. Seconds, 0.1 to 1e7. Of an
  /// accelerator that is given, its own count.
  double ddp_timeout = double(default_ddp_timeout().count()) / 1000;
  double heartbeat_timeout = double(default_heartbeat_timeout().count()) / 1000;

  // Loss of classifiers; training and evaluation (hasten/trainer/losses.h).

  /// Share of a label that is spread evenly over all classes, [0, 1): transformers'
  /// LabelSmoother and torch's cross_entropy(label_smoothing).
  double label_smoothing_factor = 0.0;
  /// What a row counts by its label: "0.5,2" in the order of the labels, each above 0;
  /// "balanced": rows / (labels * rows of the label), of the training data, as in
  /// scikit-learn; empty: all the same. The loss is the weighted sum over the sum of
  /// the weights of all the rows of an update, so it is torch's
  /// cross_entropy(weight) of the joined batch, however that is split. Numbers for a
  /// head of several labels a row are torch's pos_weight.
  std::string class_weights{};

  // Optimizer (with decay on all but biases and norms) and schedule.

  /// See optim/make_optimizer.h.
  OptimizerType optim = OptimizerType::adamw_torch;
  /// "name=value,name=value", of that optimizer; see optim/make_optimizer.h.
  std::string optim_args{};
  /// Peak learning rate, >= 0.
  double learning_rate = 5e-5;
  /// Decoupled weight decay, >= 0; see optim/param_groups.h for its share.
  double weight_decay = 0.0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  /// Largest norm the gradient of an update may have, over all parameters; 0 does
  /// not clip, and then a gradient that is not finite is not looked for.
  double max_grad_norm = 1.0;
  GradNormType grad_norm_type = GradNormType::l2;
  /// Largest |number| in a gradient, limited behind the norm; 0 does not clip. Costs
  /// two passes over the gradients an update.
  double max_grad_value = 0.0;
  SchedulerType lr_scheduler_type = SchedulerType::linear;
  /// A JSON object's text, like {"num_cycles": 2}; see optim/make_schedule.h.
  std::string lr_scheduler_kwargs{};
  /// Updates over which the learning rate rises from 0; below 1: their share of
  /// all updates, rounded up. At most all of them.
  double warmup_steps = 0.0;
  /// The older spelling of a share, [0, 1]; read where warmup_steps is 0.
  double warmup_ratio = 0.0;

  // When to report, evaluate and save; N counts updates.

  /// Updates between two training records; below 1: a share of all updates (at
  /// least one update). > 0. Cost: one small all-reduce a record.
  double logging_steps = 0.01;
  /// Adds "grad_norm/NAME" to training records: of the update they are at, before
  /// clipping, with Local SGD the ranks' mean. A pass over the gradients a record.
  LogGradientNorms log_gradient_norms = LogGradientNorms::no;
  /// steps: every eval_steps; epoch: at each epoch's end. Ignored without
  /// evaluation data.
  IntervalStrategy eval_strategy = IntervalStrategy::epoch;
  /// Updates, or below 1 a share of all; > 0.
  double eval_steps = 500;
  /// Writes output_dir/checkpoint-N, from which a run can go on. Cost: three times
  /// the model's bytes on disk each (weights, two moments).
  IntervalStrategy save_strategy = IntervalStrategy::epoch;
  double save_steps = 500;
  /// checkpoint-N folders kept; the oldest go first, the best never. 0 keeps
  /// all. With 1, the best and the newest are both kept until the end.
  int64_t save_total_limit = 2;
  /// checkpoint-N folders hold the model alone: a third of the disk, and no run can
  /// go on from them.
  bool save_only_model = false;
  /// After the last update go back to the weights of the best evaluation.
  /// Needs equal strategies, and save_steps a multiple of eval_steps.
  bool load_best_model_at_end = false;
  /// Name in the evaluation record, with or without "eval_".
  std::string metric_for_best_model = "loss";
  /// Unset: true unless the metric's name ends in "loss".
  std::optional<bool> greater_is_better{};
  /// Above 0: ends training after so many evaluations in a row in which
  /// metric_for_best_model was not better than the best before by more than the
  /// threshold (hasten/trainer/early_stopping.h). Not with eval_strategy=no.
  int64_t early_stopping_patience = 0;
  double early_stopping_threshold = 0.0;
  /// Leaves out the ProgressCallback (hasten/trainer/progress_callback.h): the banner
  /// and the bars on stderr, and the table of epochs on stdout.
  bool disable_tqdm = false;

  // Randomness and data.

  /// Dropout; model initialisation where the program builds the model.
  uint64_t seed = 42;
  /// Order of the rows; unset: seed.
  std::optional<uint64_t> data_seed{};
  SamplingStrategy train_sampling_strategy = SamplingStrategy::group_by_length;
  /// Leaves out an epoch's last, smaller batch.
  bool dataloader_drop_last = false;
  /// Background threads that make batches, in training and evaluation; any number
  /// gives the same run. Each costs a thread and dataloader_prefetch_factor batches
  /// of memory.
  int64_t dataloader_num_workers = 0;
  /// Batches that each of them makes ahead, >= 1.
  int64_t dataloader_prefetch_factor = 2;
  /// Tokens a row is cut to by whoever tokenises, >= 1; the model's own limit
  /// applies where it is smaller.
  int64_t max_length = 128;

  /// Throws InputError "[trainer::training_arguments] field=value …" for the
  /// first field out of range or in contradiction to another.
  void validate() const;
  /// precision, bf16 and fp16 in one.
  Precision effective_precision() const;
  /// data_seed, or seed.
  uint64_t order_seed() const { return data_seed.value_or(seed); }
  /// "eval_loss", "eval_f1", …: metric_for_best_model with its prefix.
  std::string best_metric_name() const;
  bool best_is_greater() const;
};

/// The numbers of TrainingArguments::class_weights; none for "" and "balanced". Throws
/// InputError for anything else.
std::vector<double> class_weight_numbers(const std::string& class_weights);

/// Every field under its own name; enumerations by their spelling.
void to_json(nlohmann::json& json, const TrainingArguments& arguments);
/// Fields that are absent keep what `arguments` has. Throws InputError for a
/// name it does not know (the nearest is offered) or a value of another type.
void from_json(const nlohmann::json& json, TrainingArguments& arguments);

} // namespace hasten
