// The options of a training run. Names and defaults are those of Hugging Face's TrainingArguments;
// docs/guides/coming-from-python.md lists the defaults that differ. max_length, local_sgd_steps,
// precision, strategy, shard_size and heartbeat_timeout are not arguments there.
//
// Plain data without LibTorch, so that the `hasten` program can bind flags to it. Threading: none
// needed.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/base/timeouts.h"
#include "hasten/config/checkpoint_spec.h"
#include "hasten/config/precision.h"
#include "hasten/config/spelling.h"
#include "hasten/config/strategy.h"

namespace hasten {

/// When something is repeated. Steps are optimizer steps.
enum class IntervalStrategy { no, steps, epoch };
/// best: after each evaluation that is the best so far.
enum class SaveStrategy { no, steps, epoch, best };
/// no for best, whose times are not known before.
constexpr IntervalStrategy interval_of(SaveStrategy strategy) {
  return strategy == SaveStrategy::best ? IntervalStrategy::no
                                        : static_cast<IntervalStrategy>(strategy);
}
/// The optimizer; the first three are the same.
enum class OptimizerType {
  adamw_torch,
  adamw_torch_fused,
  adamw,
  adam,
  sgd,
  adafactor,
  lion,
  adamw_8bit
};
/// The order of the training samples; see data/loader.h.
enum class SamplingStrategy { random, sequential, group_by_length };

/// The norm of max_grad_norm; spelt 1, 2 and inf.
enum class GradNormType { l1, l2, inf };
/// Which gradient norms training records have in addition to the whole gradient's; see
/// accelerator/gradients.h.
enum class LogGradientNorms { no, layer, module, parameter };
/// The outer step of Local SGD (hasten/local_sgd/outer_step.h).
enum class LocalSGDOuter { none, slowmo, diloco };

template <>
inline constexpr auto kSpellings<IntervalStrategy> = std::array{"no", "steps", "epoch"};
template <>
inline constexpr auto kSpellings<SaveStrategy> = std::array{"no", "steps", "epoch", "best"};
template <>
inline constexpr auto kSpellings<OptimizerType> = std::array{
    "adamw_torch", "adamw_torch_fused", "adamw", "adam", "sgd", "adafactor", "lion", "adamw_8bit"};
template <>
inline constexpr auto kSpellings<SamplingStrategy> =
    std::array{"random", "sequential", "group_by_length"};
template <>
inline constexpr auto kSpellings<GradNormType> = std::array{"1", "2", "inf"};
template <>
inline constexpr auto kSpellings<LogGradientNorms> =
    std::array{"no", "layer", "module", "parameter"};
template <>
inline constexpr auto kSpellings<LocalSGDOuter> = std::array{"none", "slowmo", "diloco"};

struct TrainingArguments {
  // Files.

  /// Folder of the final model, checkpoint-N folders and records. If empty, Trainer::train() writes
  /// nothing, and save_strategy must be no.
  std::string output_dir{};
  /// Lets train() start in a folder that holds another run. That run's checkpoint-N folders and
  /// records are removed first.
  bool overwrite_output_dir = false;

  /// Where to resume from: empty starts from the beginning; auto, latest or a checkpoint-N folder:
  /// see hasten/trainer/resume.h. Excludes overwrite_output_dir.
  std::string resume_from_checkpoint{};
  /// Resumes even if arguments that alter the trajectory differ from those of the original run.
  bool allow_changed_arguments = false;

  // Length.

  /// Passes over the training data, > 0; may be fractional.
  double num_train_epochs = 3.0;
  /// Total number of steps; above 0 it overrides num_train_epochs.
  int64_t max_steps = -1;

  // Batches, memory and processes.

  /// Samples of one micro-batch on one rank, >= 1.
  int64_t per_device_train_batch_size = 8;
  /// Samples of one evaluation batch on one rank, >= 1.
  int64_t per_device_eval_batch_size = 8;
  /// Micro-batches per step, >= 1. An epoch's last window may be shorter; it is weighted by the
  /// samples that it has.
  int64_t gradient_accumulation_steps = 1;
  /// Halves per_device_train_batch_size until a step on the longest samples fits into memory on
  /// every rank. Every size tried divides the product of per_device_train_batch_size and
  /// gradient_accumulation_steps; the latter grows so that a step keeps its samples. The run
  /// then equals one that starts with the size found. Costs two forward and backward passes per
  /// size, before training. Excludes gradient_checkpointing=budget, which fits activations to the
  /// batch instead.
  bool auto_find_batch_size = false;
  /// With auto_find_batch_size: limit for the tensors of one process on its device, "2GB" or
  /// "512MiB", including the model and the optimizer's state. Empty: 90 % of the device's free
  /// memory at the start. On the CPU that is the host's, divided by its ranks.
  std::string memory_limit{};
  /// Saves memory by recomputing activations of blocks in backward; gradients stay equal bit for
  /// bit. true (every block), or "every:2", "ops", "budget:50%", … (checkpoint_spec.h). A budget is
  /// planned on the longest batch before training. In JSON also called activation_checkpointing. A
  /// model that already has it enabled keeps its setting.
  GradientCheckpointing gradient_checkpointing{};

  /// Trains and evaluates in 16 bits (docs/guides/mixed-precision.md). Setting both is an error.
  /// fp16 scales losses and skips steps whose gradients overflow.
  bool bf16 = false;
  bool fp16 = false;
  /// The same as one option: no, bf16, fp16 or automatic. no is fp32 and the default, because then
  /// a run's results do not depend on the machine. automatic uses bf16 if a short probe finds it
  /// 1.3 times as fast on every rank, and on GPUs if all have it in hardware. The choice is logged and written to training_args.json, and a
  /// resumed run keeps it.
  Precision precision = Precision::no;
  /// Products in fp32 use TF32: AcceleratorOptions::tf32. An accelerator that is passed in has its
  /// own.
  bool tf32 = false;

  /// On a GPU: forward and backward of each shape of batch are captured once in CUDA graphs and then
  /// launched as two, bit for bit the same. It pays where launching takes longer than computing:
  /// small models and batches. The first 3 batches of a shape run without graphs, because a capture
  /// needs them. At most 8 shapes are captured, and batches of other shapes run without graphs. So
  /// pad to few lengths, and drop the last batch. Clipping and the optimizer, about 25 launches,
  /// are not part of a graph.
  ///
  /// The loss function may use only tensors of the device, and reading a value on the host is an error.
  /// Its weight is a DeviceScalar, or the number of samples or of a tensor's elements; another number of
  /// the host is an error, because a graph would keep it. Excludes gradient_checkpointing,
  /// local_sgd_steps and other strategies than ddp. Memory: the activations of the largest shape,
  /// and one copy of the gradients for each shape.
  bool cuda_graphs = false;

  /// What is sharded over processes: nothing (ddp), the optimizer state (zero1), gradients, too
  /// (zero2), parameters, too (fsdp; hsdp: within groups of shard_size processes, each of which is
  /// a replica). Saves memory; the results are the same. See docs/guides/sharding.md. No effect
  /// with one process.
  Strategy strategy = Strategy::ddp;

  /// For hsdp: number of consecutive processes that share a replica; a divisor of the number of
  /// processes. 0: the processes of a host.
  int64_t shard_size = 0;

  /// Above 0: Local SGD. Each process updates its own weights. They are averaged every this many
  /// steps, and before every evaluation and save. Gradients are not sent
  /// (hasten/local_sgd/local_sgd.h). No effect with one process. Memory: one more copy of the
  /// weights.
  int64_t local_sgd_steps = 0;
  /// The fields of LocalSGDOptions and AveragerOptions of these names. Plain training in the first
  /// post_local_start steps. `delay` up to local_sgd_steps; memory: one more copy.
  int64_t local_sgd_post_local_start = 0;
  int64_t local_sgd_delay = 0;
  /// SlowMo or DiLoCo with its learning rate and momentum (empty: that class's default). Memory: two
  /// more copies.
  LocalSGDOuter local_sgd_outer = LocalSGDOuter::none;
  std::optional<double> local_sgd_outer_lr{};
  std::optional<double> local_sgd_outer_momentum{};
  /// Above 0: groups of processes also average among themselves every inner_steps steps, a divisor of
  /// local_sgd_steps. A group is group_size consecutive processes; 0: the processes of a host. Memory:
  /// one more copy.
  int64_t local_sgd_inner_steps = 0;
  int64_t local_sgd_group_size = 0;
  /// Rank 0 computes the averages (SyncStrategy::driver).
  bool local_sgd_driver = false;

  /// Where processes compute: AcceleratorOptions::device. `use_cpu` is short for "cpu". An
  /// accelerator that is passed in has its own.
  std::string device = "auto";
  bool use_cpu = false;

  /// Moves tensors between processes: "auto" (nccl on GPUs; on the CPU shm on one host, shm and gloo
  /// together on several), "shm", "gloo", "nccl", or a back end that the program has registered (hasten/comm/backend.h). An
  /// accelerator that is passed in uses its own.
  std::string ddp_backend = "auto";

  /// ddp_timeout limits the wait for a process that is alive but late. heartbeat_timeout limits the
  /// time until a process that died or froze is reported (CommunicatorOptions). Seconds, 0.1 to
  /// 1e7. An accelerator that is passed in uses its own limits.
  double ddp_timeout = double(default_ddp_timeout().count()) / 1000;
  double heartbeat_timeout = double(default_heartbeat_timeout().count()) / 1000;

  // Loss of classifiers, in training and evaluation (hasten/trainer/losses.h).

  /// Label smoothing: the part of a label that is spread evenly over all classes, [0, 1);
  /// transformers' LabelSmoother and torch's cross_entropy(label_smoothing).
  double label_smoothing_factor = 0.0;
  /// Weights of the classes: "0.5,2" in the order of the labels, each above 0; "balanced": samples
  /// / (labels * samples of the label) in the training data, as in scikit-learn; empty: all equal.
  /// The loss is the weighted sum divided by the sum of the weights of all samples of a step. So
  /// it is torch's cross_entropy(weight) of the joined batch, for any split into batches. With
  /// several labels per sample, the values are torch's pos_weight.
  std::string class_weights{};

  // Optimizer (weight decay applies to all but biases and norms) and schedule.

  /// See optim/make_optimizer.h.
  OptimizerType optim = OptimizerType::adamw_torch;
  /// "name=value,name=value" for that optimizer; see optim/make_optimizer.h.
  std::string optim_args{};
  /// Peak learning rate, >= 0.
  double learning_rate = 5e-5;
  /// Decoupled weight decay, >= 0; see optim/param_groups.h for the parameters that have it.
  double weight_decay = 0.0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  /// Clips the gradient of a step to this norm, over all parameters. 0 does not clip; then a
  /// gradient that is not finite is not detected.
  double max_grad_norm = 1.0;
  GradNormType grad_norm_type = GradNormType::l2;
  /// Clips each element of the gradients to this absolute value, after clipping the norm; 0 does
  /// not clip. Costs two passes over the gradients per step.
  double max_grad_value = 0.0;
  /// The learning rate after the warm-up: a name of schedule_names() (config/schedule.h).
  /// reduce_lr_on_plateau decreases it, at evaluations, when metric_for_best_model has stopped
  /// improving.
  std::string lr_scheduler_type = "linear";
  /// A JSON object as text, for example {"num_cycles": 2}; see make_schedule().
  std::string lr_scheduler_kwargs{};
  /// Steps during which the learning rate rises from 0; below 1: a fraction of all steps,
  /// rounded up. At most all of them.
  double warmup_steps = 0.0;
  /// The older spelling of a fraction, [0, 1]; used if warmup_steps is 0.
  double warmup_ratio = 0.0;

  // When to report, evaluate and save; counted in steps.

  /// Steps between two training records, > 0; below 1: a fraction of all steps (at least one
  /// step). Cost: one small all-reduce per record.
  double logging_steps = 0.01;
  /// Adds "grad_norm/NAME" to training records: the norms in the record's step, before clipping;
  /// with Local SGD the mean over ranks. Costs a pass over the gradients per record.
  LogGradientNorms log_gradient_norms = LogGradientNorms::no;
  /// steps: every eval_steps; epoch: at the end of each epoch. Ignored without evaluation data.
  IntervalStrategy eval_strategy = IntervalStrategy::epoch;
  /// Steps, or below 1 a fraction of all steps; > 0.
  double eval_steps = 500;
  /// No evaluation before this many steps (eval_strategy=steps) or epochs (eval_strategy=epoch).
  double eval_delay = 0;
  /// Evaluates before the first step, too. It changes neither the best model nor the learning rate.
  bool eval_on_start = false;
  /// Writes output_dir/checkpoint-N, from which a run can resume. Each takes three times the
  /// model's size on disk (weights and two moments).
  SaveStrategy save_strategy = SaveStrategy::epoch;
  double save_steps = 500;
  /// Number of checkpoint-N folders to keep. The oldest are removed first, the best never. 0 keeps
  /// all. With 1, the best and the newest are both kept until the end.
  int64_t save_total_limit = 2;
  /// Saves only the model in checkpoint-N folders: a third of the disk space, but no run can resume
  /// from them.
  bool save_only_model = false;
  /// For hosts with output folders on their own disks: how many hosts keep each host's part of a checkpoint.
  /// With 2 the loss of one host's disk loses nothing; each save sends every host's part to another. ≥ 1.
  int64_t save_replicas = 1;
  /// For such hosts: each writes the final model. Otherwise rank 0's host writes it.
  bool save_on_each_node = false;
  /// Loads the weights of the best evaluation after the last step. Needs equal strategies, and
  /// save_steps must be a multiple of eval_steps; or save_strategy=best.
  bool load_best_model_at_end = false;
  /// Name of a metric in the evaluation record, with or without "eval_".
  std::string metric_for_best_model = "loss";
  /// Default: false for a metric whose name ends in loss, perplexity, mse or mae, else true.
  /// transformers knows only loss.
  std::optional<bool> greater_is_better{};
  /// Above 0: stops training after this many evaluations in a row in which metric_for_best_model
  /// did not beat the best so far by more than early_stopping_threshold
  /// (hasten/trainer/early_stopping.h). Not with eval_strategy=no.
  int64_t early_stopping_patience = 0;
  double early_stopping_threshold = 0.0;
  /// Trackers that record the run (docs/guides/records.md): tensorboard, csv, a name of
  /// register_tracker(), or several with commas; none. The Trainer and the programs check the names.
  /// metrics.jsonl, which is json, is always written.
  std::string report_to = "none";
  /// Folder of the trackers' files. Empty: output_dir/runs/DATE_HOST, a new one for each start.
  std::string logging_dir{};
  /// Disables the ProgressCallback (hasten/trainer/progress_callback.h): the banner and the bars on
  /// stderr, and the table of epochs on stdout.
  bool disable_tqdm = false;

  // Randomness and data.

  /// Seed of dropout, and of the model's initial weights if the program makes the model.
  uint64_t seed = 42;
  /// On a GPU a run that is repeated, or resumed, gives the same bits: AcceleratorOptions::full_determinism.
  /// An accelerator that is passed in has its own. On the CPU this is always so.
  bool full_determinism = false;
  /// Seed of the order of samples; default: seed.
  std::optional<uint64_t> data_seed{};
  SamplingStrategy train_sampling_strategy = SamplingStrategy::group_by_length;
  /// Drops an epoch's last, smaller batch.
  bool dataloader_drop_last = false;
  /// Background threads that make batches, in training and evaluation. Any number gives the same
  /// run. Each costs a thread and the memory of dataloader_prefetch_factor batches.
  int64_t dataloader_num_workers = 0;
  /// Batches that each worker prefetches, >= 1.
  int64_t dataloader_prefetch_factor = 2;
  /// Maximum number of tokens of a sample, >= 1. Tokenizing truncates to it. The model's own limit
  /// applies if it is smaller.
  int64_t max_length = 128;

  /// Throws InputError "[trainer::training_arguments] field=value …" for the first field that is
  /// out of range or contradicts another.
  void validate() const;
  /// The precision that follows from precision, bf16 and fp16.
  Precision effective_precision() const;
  /// data_seed, or seed.
  uint64_t order_seed() const { return data_seed.value_or(seed); }
  /// metric_for_best_model with its prefix: "eval_loss", "eval_f1", ….
  std::string best_metric_name() const;
  /// Copies of the trained weights that Local SGD keeps.
  int64_t averaging_copies() const {
    return 1 + (local_sgd_delay > 0) + (local_sgd_inner_steps > 0) +
           (local_sgd_outer == LocalSGDOuter::none ? 0 : 2);
  }
  bool best_is_greater() const;
};

/// The values of TrainingArguments::class_weights; empty for "" and "balanced". Throws InputError
/// for anything else.
std::vector<double> class_weight_numbers(const std::string& class_weights);

/// The names in TrainingArguments::report_to, each once; tracking/tracker.h says which there are.
std::vector<std::string> tracker_names(const std::string& report_to);

/// Writes every field under its own name; enumerations by their spelling.
void to_json(nlohmann::json& json, const TrainingArguments& arguments);
/// Fields that are absent keep their value in `arguments`. Throws InputError for an unknown name
/// (suggesting the nearest) or a value of another type.
void from_json(const nlohmann::json& json, TrainingArguments& arguments);

} // namespace hasten
