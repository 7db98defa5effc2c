#include <algorithm>
#include <cmath>

#include "flags.h"
#include "hasten/config/schedule.h"
#include "hasten/tracking/tracker.h"

namespace hasten::detail {

void declare_train_data(FlagTable& flags, TrainCommand& command) {
  flags.group("Model");
  flags.value("--task", command.task, "NAME", joined(task_choices()));
  flags.value(
      "--model", command.model, "FOLDER|NAME|SHAPE",
      "Hugging Face folder (config.json, model.safetensors, vocab.txt), the NAME or "
      "NAME@REVISION of a repository on Hugging Face's hub, or a shape with random weights: " +
          model_shapes_text());
  flags.required();
  declare_offline(flags, command.offline);
  flags.value("--tokenizer", command.tokenizer, "FOLDER|NAME",
              "vocabulary for a shape (default: learned from the training texts)");
  flags.value("--vocab-size", command.vocab_size, "PIECES", "maximum size of a learned vocabulary",
              kPieces);
  flags.flag("--cased", command.cased, "a learned vocabulary keeps upper case and accents");

  flags.group("Data");
  flags.value(
      "--train-file,--train-data", command.train_file, "FILE,...",
      "training data, .csv, .tsv or .jsonl, also .gz; words with tags are .jsonl or CoNLL; texts "
      "for text-generation also .txt, or records with a prompt and a completion; "
      "several files with commas or as a pattern in quotes, 'part-*.csv' (default: the "
      "4,000 generated reviews of hasten synth reviews, 10 % of them for evaluation)");
  declare_table(flags, command.table, true);
  flags.value("--problem-type", command.problem_type, "NAME",
              "single_label_classification, regression (labels are numbers) or "
              "multi_label_classification (default: from the label columns and the model)");
  flags.value("--mlm-probability", command.mlm_probability, "SHARE",
              "fill-mask: share of the tokens that the model has to find");
  flags.flag("--whole-word-mask", command.whole_word_mask,
             "fill-mask: mask all tokens of a word together");
  flags.value(
      "--attn-implementation", command.attn_implementation, "NAME",
      "decoders: eager keeps attention's scores for backward, sdpa computes them again; auto: "
      "sdpa for 256 tokens or more");
  flags.value("--block-size", command.block_size, "TOKENS",
              "text-generation: tokens of a row (default: 1024, or the model's limit if that is "
              "lower)",
              kAnyRows);
  flags.value("--packing-strategy", command.packing_strategy, "NAME",
              "text-generation: bfd_split (documents share rows, and none sees another), wrapped "
              "(all documents are one text, cut into rows) or none (a document in each row)");
  flags.value("--sample-by", command.sample_by, "WHAT",
              "text-generation: a document of a .txt file: line, paragraph (lines between empty "
              "lines) or document (the whole file)");
  flags.value("--eval-file,--eval-data", command.eval_file, "FILE,...",
              "evaluation data, as for --train-file");
  flags.value("--eval-split", command.eval_split, "FRACTION",
              "without --eval-file: fraction of the training samples used for evaluation, "
              "0 to 1, stratified by label");
  flags.value("--max-train-rows", command.max_train_rows, "SAMPLES",
              "use only the first SAMPLES that pass the filters; 0 uses all", kAnyRows);
  flags.value("--max-eval-rows", command.max_eval_rows, "SAMPLES",
              "use only the first SAMPLES of --eval-file; 0 uses all", kAnyRows);
  flags.value("--report-texts", command.report_texts, "on|off",
              "texts of the samples that the model is most wrong about, in eval_results.json and "
              "report.html; off leaves them out");
  flags.value("--cache-dir", command.cache_dir, "FOLDER",
              "folder of token ids that later runs reuse (default: HASTEN_CACHE, or "
              "$XDG_CACHE_HOME/hasten, or ~/.cache/hasten)");
  flags.value("--max-length", command.arguments.max_length, "TOKENS",
              "truncate longer texts; at most the model's limit");
}

void declare_lora(FlagTable& flags, LoraFlags& lora) {
  flags.group("LoRA");
  flags.value("--lora-r", lora.r, "RANK",
              "train LoRA's additional matrices of this rank and freeze the model; 0: train all "
              "weights",
              NumberRange{0, 65'536});
  flags.value("--lora-alpha", lora.alpha, "ALPHA", "the update is multiplied by ALPHA / RANK");
  flags.value("--lora-dropout", lora.dropout, "SHARE", "dropout before the additional matrices");
  flags.value("--lora-target-modules", lora.target_modules, "NAME,...",
              "linear layers to adapt, by name or end of name; all-linear: all but the head "
              "(default: PEFT's choice for the model's type, such as query,value)");
  flags.value("--lora-exclude-modules", lora.exclude_modules, "NAME,...",
              "layers that stay as they are, by the same rule");
  flags.value("--lora-layers-to-transform", lora.layers_to_transform, "N,...",
              "numbers of the blocks to adapt; without it all");
  flags.value("--lora-rank-pattern", lora.rank_pattern, "PATTERN=RANK,...",
              "other ranks, by regular expressions of names or of their ends");
  flags.value("--lora-alpha-pattern", lora.alpha_pattern, "PATTERN=ALPHA,...", "other alphas");
  flags.value("--lora-bias", lora.bias, "NAME",
              "biases to train: none, all, or lora_only, those of adapted layers");
  flags.flag("--lora-use-dora", lora.use_dora,
             "train the lengths of the weights' rows, too (DoRA)");
  flags.value("--lora-modules-to-save", lora.modules_to_save, "NAME,...",
              "modules to train whole and save with the adapter; a classifier's head always is");
}

void check_lora(const FlagTable& flags, const LoraFlags& lora) {
  flags.require(!flags.written("--lora-r") || lora.r > 0, "--lora-r=" + std::to_string(lora.r),
                "at least 1", "leave it out to train all weights");
  flags.require(std::isfinite(lora.alpha) && lora.alpha > 0,
                "--lora-alpha=" + flag_text(lora.alpha), "a positive number");
  flags.require(lora.dropout >= 0 && lora.dropout < 1, "--lora-dropout=" + flag_text(lora.dropout),
                "from 0 to below 1");
  flags.require(lora.r > 0 || lora == LoraFlags(), "--lora-r is missing",
                "--lora-r RANK, such as --lora-r 8, with the other flags of LoRA");
}

void declare_precision(FlagTable& flags, TrainingArguments& a) {
  flags.value("--precision,--mixed-precision", a.precision, "NAME",
              "fp32, bf16 (matrix products in 16 bits), fp16 (the same with loss scaling) or "
              "auto: bf16 if a short probe finds it clearly faster on every rank, or if every "
              "rank's GPU has it in hardware");
  flags.flag("--bf16", a.bf16, "same as --precision bf16");
  flags.flag("--fp16", a.fp16, "same as --precision fp16");
  flags.flag("--tf32", a.tf32, "products in fp32 use TF32 (NVIDIA GPUs, Ampere or newer)");
}

void declare_checkpointing(FlagTable& flags, TrainingArguments& a) {
  flags.value("--gradient-checkpointing,--activation-checkpointing", a.gradient_checkpointing,
              "HOW",
              "recompute activations to save memory: none, full (also without a value), "
              "every:K blocks, ops, budget:BYTES or budget:50%");
}

void declare_backend(FlagTable& flags, TrainingArguments& a) {
  flags.value("--device", a.device, "NAME",
              "auto (a GPU for each process, else the CPU), cpu, cuda, or cuda:N");
  flags.flag("--use-cpu", a.use_cpu, "the same as --device cpu");
  flags.value("--ddp-backend,--backend", a.ddp_backend, "NAME",
              "what moves tensors between processes: auto (nccl on GPUs, else shm or gloo), shm "
              "(through the memory of one host), gloo (through sockets), nccl (between GPUs)");
}

void check_backend(const FlagTable& flags, const TrainingArguments& a) {
  // `hasten` does not see LibTorch and so not backend_names().
  const std::vector<std::string> known{"auto", "gloo", "nccl", "shm"};
  flags.require(std::ranges::find(known, a.ddp_backend) != known.end(),
                "--backend=" + a.ddp_backend, "one of " + joined(known),
                write_nearest(a.ddp_backend, known));
}

void declare_run(FlagTable& flags, TrainCommand& command, bool& print_config) {
  TrainingArguments& a = command.arguments;
  flags.group("Processes and output");
  declare_processes(flags, command.nproc, command.oversubscribe);
  flags.value("--config", command.config, "FILE",
              "JSON object of flags by name (learning_rate); flags on the command line "
              "override it; a run's training_args.json is such a file");
  flags.flag("--print-config", print_config,
             "print all flags with their values and help as a file for --config, nothing else");
  flags.flag("--dry-run", command.dry_run, "print what the run would do, without training");
  flags.value("--output-dir", a.output_dir, "FOLDER",
              "folder for the model, checkpoint-N folders, metrics.jsonl and records");
  flags.required();
  flags.flag("--overwrite-output-dir", a.overwrite_output_dir,
             "remove another run's files from the output folder first");
  flags.value("--resume-from-checkpoint", a.resume_from_checkpoint, "WHERE",
              "auto: resume the run in the output folder, or start one if there is none; "
              "latest: resume, or fail if there is none; or a checkpoint-N folder");
  flags.flag("--allow-changed-arguments", a.allow_changed_arguments,
             "resume even if arguments that alter the run have changed");
}

void declare_local_sgd(FlagTable& flags, TrainingArguments& a) {
  flags.value("--local-sgd-steps", a.local_sgd_steps, "STEPS",
              "Local SGD: processes train independently and average their weights every "
              "STEPS steps; 0: gradients are averaged in each step");
  flags.value("--local-sgd-post-local-start", a.local_sgd_post_local_start, "STEPS",
              "Local SGD begins after this many steps in which gradients are averaged");
  flags.value(
      "--local-sgd-delay", a.local_sgd_delay, "STEPS",
      "weights are sent while training continues; their mean arrives this many steps later");
  flags.value("--local-sgd-outer", a.local_sgd_outer, "NAME",
              "outer optimizer, whose step replaces the mean: none, slowmo or diloco");
  flags.value("--local-sgd-outer-lr", a.local_sgd_outer_lr, "RATE",
              "its learning rate (default: slowmo 1, diloco 0.7)");
  flags.value("--local-sgd-outer-momentum", a.local_sgd_outer_momentum, "FACTOR",
              "its momentum (default: slowmo 0.5, diloco 0.9)");
  flags.value("--local-sgd-inner-steps", a.local_sgd_inner_steps, "STEPS",
              "groups of processes also average among themselves every STEPS steps");
  flags.value("--local-sgd-group-size", a.local_sgd_group_size, "N",
              "consecutive processes of a group (default: the processes of a host)");
  flags.flag("--local-sgd-driver", a.local_sgd_driver,
             "rank 0 computes the averages, as a parameter server");
}

/// Flags of strategies and of processes that fail.
void declare_strategy(FlagTable& flags, TrainingArguments& a) {
  flags.value("--strategy", a.strategy, "NAME",
              "what is sharded over processes: ddp (nothing), zero1 (optimizer state), "
              "zero2 (gradients, too), fsdp (parameters, too) or hsdp (fsdp in groups of "
              "--shard-size processes, each with a replica of the model)");
  declare_shard_size(flags, a.shard_size);
  declare_local_sgd(flags, a);
  declare_backend(flags, a);
  flags.value("--ddp-timeout", a.ddp_timeout, "SECONDS",
              "limit of waiting for a process that is alive but late");
  flags.value("--heartbeat-timeout", a.heartbeat_timeout, "SECONDS",
              "limit until a process that died, froze or is unreachable is reported");
}

void declare_batches(FlagTable& flags, TrainingArguments& a) {
  flags.group("Length and batches");
  flags.value("--num-train-epochs,--epochs", a.num_train_epochs, "EPOCHS",
              "passes over the data; may be fractional");
  flags.value("--max-steps", a.max_steps, "STEPS",
              "number of optimizer steps; above 0 it overrides the epochs");
  flags.value("--per-device-train-batch-size,--batch-size", a.per_device_train_batch_size,
              "SAMPLES", "samples of a micro-batch on one process");
  flags.value("--per-device-eval-batch-size", a.per_device_eval_batch_size, "SAMPLES",
              "samples of an evaluation batch on one process");
  flags.value("--gradient-accumulation-steps", a.gradient_accumulation_steps, "N",
              "micro-batches per step");
  flags.flag("--auto-find-batch-size", a.auto_find_batch_size,
             "halve the micro-batch until the longest samples fit into memory, and "
             "accumulate more of them instead");
  flags.value("--memory-limit", a.memory_limit, "BYTES",
              "with --auto-find-batch-size: limit of tensor memory per process, e.g. 2GB "
              "(default: 90 % of the free memory, divided by the processes)");
  declare_precision(flags, a);
  flags.flag("--cuda-graphs", a.cuda_graphs,
             "on a GPU: capture forward and backward of each shape of batch in CUDA graphs, for "
             "models and batches so small that launching takes longer than computing");
  declare_strategy(flags, a);
  declare_checkpointing(flags, a);
  flags.value(
      "--train-sampling-strategy", a.train_sampling_strategy, "ORDER",
      "random, sequential or group_by_length (batches of similar length, with less padding)");
  flags.flag("--dataloader-drop-last", a.dataloader_drop_last,
             "drop an epoch's last, smaller batch");
  flags.value("--dataloader-num-workers", a.dataloader_num_workers, "THREADS",
              "background threads that make batches; any number gives the same run");
  flags.value("--dataloader-prefetch-factor", a.dataloader_prefetch_factor, "BATCHES",
              "batches prefetched per worker");
}

void declare_loss(FlagTable& flags, TrainingArguments& a) {
  flags.group("Loss");
  flags.value("--label-smoothing-factor", a.label_smoothing_factor, "FACTOR",
              "label smoothing, 0 to 1");
  flags.value("--class-weights", a.class_weights, "W,W|balanced",
              "weights of the classes in the labels' order; balanced: inverse to their frequency");
}

void declare_optimizer(FlagTable& flags, TrainingArguments& a) {
  flags.value("--optim", a.optim, "NAME",
              joined(spelling_names<OptimizerType>()) + "; adamw has three names");
  flags.value("--optim-args", a.optim_args, "ARGS",
              "the optimizer's arguments: name=value,name=value, e.g. momentum=0.9");
}

void declare_optimizer_and_schedule(FlagTable& flags, TrainingArguments& a) {
  flags.group("Optimizer and schedule");
  declare_optimizer(flags, a);
  flags.value("--learning-rate,--lr", a.learning_rate, "RATE",
              "peak learning rate; 3e-4 for a shape");
  flags.value("--weight-decay", a.weight_decay, "RATE",
              "decoupled weight decay; biases and norms have none");
  flags.value("--adam-beta1", a.adam_beta1, "BETA", "Adam's beta1: decay of the mean gradient");
  flags.value("--adam-beta2", a.adam_beta2, "BETA", "Adam's beta2: decay of the mean square");
  flags.value("--adam-epsilon", a.adam_epsilon, "EPSILON", "Adam's epsilon");
  flags.value("--max-grad-norm", a.max_grad_norm, "NORM",
              "clip gradients to this norm; 0 does not clip");
  flags.value("--grad-norm-type", a.grad_norm_type, "P",
              "norm that --max-grad-norm limits: 1, 2 or inf");
  flags.value("--max-grad-value", a.max_grad_value, "VALUE",
              "clip each element of the gradients to this value; 0 does not clip");
  flags.value("--lr-scheduler-type", a.lr_scheduler_type, "NAME", joined(schedule_names()));
  flags.value("--lr-scheduler-kwargs", a.lr_scheduler_kwargs, "JSON",
              "the schedule's arguments, e.g. '{\"num_cycles\": 2}'");
  flags.value("--warmup-steps", a.warmup_steps, "STEPS",
              "steps of warm-up; below 1: a fraction of all");
  flags.value("--warmup-ratio", a.warmup_ratio, "FRACTION",
              "warm-up as a fraction of all steps; older than --warmup-steps");
  flags.group("Randomness");
  flags.value("--seed", a.seed, "N", "random seed of initial weights, dropout, split and order");
  flags.flag(
      "--full-determinism", a.full_determinism,
      "on a GPU: slower kernels, with which a run can be repeated bit for bit, as always on the "
      "CPU");
  flags.value("--data-seed", a.data_seed, "N",
              "random seed of the order of samples (default: --seed)");
}

void declare_reports(FlagTable& flags, TrainingArguments& a) {
  flags.group("Reports, evaluation and saves");
  flags.value("--logging-steps", a.logging_steps, "STEPS",
              "steps between two records; below 1: a fraction of all");
  flags.value("--log-gradient-norms", a.log_gradient_norms, "OF",
              "gradient norms in the records: no, layer, module or parameter");
  flags.value("--eval-strategy", a.eval_strategy, "WHEN", "when to evaluate: no, steps or epoch");
  flags.value("--eval-steps", a.eval_steps, "STEPS",
              "with strategy steps: steps between evaluations; below 1: a fraction of all");
  flags.value("--eval-delay", a.eval_delay, "N",
              "steps, or epochs with strategy epoch, before the first evaluation");
  flags.flag("--eval-on-start", a.eval_on_start, "evaluate before the first step, too");
  flags.value("--save-strategy", a.save_strategy, "WHEN",
              "when to save checkpoint-N folders: no, steps, epoch, or best (after each evaluation "
              "that is the best so far)");
  flags.value("--save-steps", a.save_steps, "STEPS",
              "with strategy steps: steps between saves; below 1: a fraction of all");
  flags.value("--save-total-limit", a.save_total_limit, "N",
              "number of checkpoint-N folders to keep; the best is always kept; 0 keeps all");
  flags.flag("--save-only-model", a.save_only_model,
             "save only the model in checkpoint-N folders; no run can resume from them");
  flags.value("--save-replicas", a.save_replicas, "N",
              "hosts with own disks: how many hosts keep each host's part of a checkpoint");
  flags.flag("--save-on-each-node", a.save_on_each_node,
             "hosts with own disks: write the final model on each host, not only on rank 0's");
  flags.flag("--load-best-model-at-end", a.load_best_model_at_end,
             "the final model is that of the best evaluation");
  flags.value("--metric-for-best-model", a.metric_for_best_model, "NAME",
              "loss, or a metric of the evaluation: accuracy, f1; mse, mae, pearson, "
              "spearman (regression); f1_micro, f1_macro (several labels)");
  flags.value("--greater-is-better", a.greater_is_better, "true|false",
              "direction of the metric (default: true unless it is a loss)");
  flags.value("--early-stopping-patience", a.early_stopping_patience, "N",
              "stop after N evaluations in a row without a better metric; 0: never");
  flags.value("--early-stopping-threshold", a.early_stopping_threshold, "BY",
              "minimum improvement that counts as better; must be exceeded");
  flags.value("--report-to", a.report_to, "NAMES",
              "trackers that record the run: " + joined(registered_trackers()) +
                  " (html: report.html), or several with commas; none");
  flags.value("--logging-dir", a.logging_dir, "FOLDER",
              "folder of the trackers' files (default: runs/DATE_HOST in the output folder)");
  flags.flag("--disable-tqdm", a.disable_tqdm,
             "print no banner, no progress bars and no table of epochs");
}

void validate_arguments(const FlagTable& flags, const TrainingArguments& arguments) {
  try {
    arguments.validate();
    check_trackers(flags.where().c_str(), arguments.report_to);
  } catch (const InputError& error) {
    throw InputError(flags.where(), flags.with_flag_names(std::string(error.text())));
  }
}

void complete_checkpointing(std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] != "--gradient-checkpointing" &&
        arguments[i] != "--activation-checkpointing") {
      continue;
    }
    if (i + 1 == arguments.size() || arguments[i + 1].rfind("--", 0) == 0) {
      arguments[i] += "=full";
    }
  }
}

/// A precision on the command line or in the environment (`set` is true for its flags) replaces all
/// three settings of what these override.
void settle_precision(TrainingArguments& a, const std::function<bool(const char*)>& set) {
  const bool bf16 = set("--bf16");
  const bool fp16 = set("--fp16");
  if (!bf16 && !fp16 && !set("--precision")) {
    return;
  }
  a.bf16 = a.bf16 && bf16;
  a.fp16 = a.fp16 && fp16;
  if (!set("--precision")) {
    a.precision = Precision::no;
  }
}

void require_metric_of(const FlagTable& flags, const TrainingArguments& arguments,
                       const std::string& problem) {
  std::vector<std::string> names{"loss", "runtime", "samples_per_second", "steps_per_second"};
  const std::vector<std::string> of_problem =
      problem == "token-classification"
          ? std::vector<std::string>{"f1", "precision", "recall", "accuracy"}
      : problem == "fill-mask"       ? std::vector<std::string>{"perplexity", "accuracy"}
      : problem == "text-generation" ? std::vector<std::string>{"perplexity"}
      : problem == "regression"      ? std::vector<std::string>{"mse", "mae", "pearson", "spearman"}
      : problem == "multi_label_classification"
          ? std::vector<std::string>{"f1_micro", "f1_macro", "accuracy"}
          : std::vector<std::string>{"accuracy", "f1"};
  names.insert(names.end(), of_problem.begin(), of_problem.end());
  const std::string wanted = arguments.best_metric_name().substr(5);
  flags.require(std::find(names.begin(), names.end(), wanted) != names.end(),
                "--metric-for-best-model=" + arguments.metric_for_best_model,
                "one of loss, " + joined(of_problem), write_nearest(wanted, names));
}

/// Checks the flags that only text-generation has, and those that it lacks.
void check_causal_task(const FlagTable& flags, const TrainCommand& command) {
  const std::string with = " with --task=" + command.task;
  const TrainCommand none;
  if (command.task != "text-generation") {
    flags.require(command.block_size == 0 && command.packing_strategy == none.packing_strategy &&
                      command.sample_by == none.sample_by,
                  "--block-size, --packing-strategy or --sample-by" + with,
                  "--task text-generation");
    return;
  }
  flags.require(!command.train_file.empty(), "no --train-file" + with, "a file with texts");
  flags.require(command.block_size != 1, "--block-size=1", "at least 2 tokens");
  flags.require(command.arguments.max_length == TrainingArguments().max_length,
                "--max-length" + with, "--block-size", "write --block-size");
  flags.require(command.mlm_probability == none.mlm_probability && !command.whole_word_mask,
                "--mlm-probability or --whole-word-mask" + with, "--task fill-mask");
  flags.require(!is_model_shape(command.model) || !command.model.starts_with("bert"),
                "--model=" + command.model + with, "a decoder, such as gpt2-mini or llama-mini");
  flags.require(!is_model_shape(command.model) || !command.tokenizer.empty(),
                "--model=" + command.model + with + " without --tokenizer",
                "--tokenizer FOLDER, whose tokens give the text back",
                "take that of a trained model, such as GPT-2's or Llama's");
}

/// Checks the flags of a task that has one kind of labels, and names its columns.
void check_token_task(const FlagTable& flags, TrainCommand& command) {
  const bool words = command.task == "token-classification";
  const bool pairs = command.task == "text-generation"; // of prompt and completion
  const TableFlags& table = command.table;
  const std::string with = " with --task=" + command.task;
  const TrainingArguments& a = command.arguments;
  flags.require(command.problem_type.empty(), "--problem-type=" + command.problem_type + with, {},
                "leave it out");
  flags.require(table.label_columns.empty() && table.label_separator.empty() &&
                    (pairs || table.text_pair_column.empty()),
                "--label-columns, --label-separator or --text-pair-column" + with,
                "one column of texts");
  flags.require(words || table.label_column.empty(), "--label-column=" + table.label_column + with,
                "no labels", "leave it out");
  flags.require(words || (a.class_weights.empty() && a.label_smoothing_factor == 0),
                "--class-weights or --label-smoothing-factor" + with, "classes");
  flags.require(a.class_weights != "balanced", "--class-weights=balanced" + with,
                "a weight for each label");
  flags.require(!words || !command.train_file.empty(), "no --train-file" + with,
                "a file with words and tags");
  flags.require(command.mlm_probability > 0 && command.mlm_probability <= 1,
                "--mlm-probability=" + flag_text(command.mlm_probability),
                "a share, above 0 and at most 1");
  require_metric_of(flags, a, command.task);
  const std::vector<std::string> ways{"auto", "eager", "sdpa"};
  flags.require(std::ranges::find(ways, command.attn_implementation) != ways.end(),
                "--attn-implementation=" + command.attn_implementation, joined(ways),
                write_nearest(command.attn_implementation, ways));
}

/// Determines the problem type and checks that the flags agree on it.
void check_problem(const FlagTable& flags, TrainCommand& command) {
  const bool words = command.task == "token-classification";
  const auto name = [](std::string& column, const char* by_default) {
    column = column.empty() ? by_default : column;
  };
  check_causal_task(flags, command);
  if (command.task != "text-generation") { // where the file says which columns it has
    name(command.table.text_column, words ? "tokens" : "text");
  }
  if (command.task != "text-classification") {
    check_token_task(flags, command);
    name(command.table.label_column, words ? "ner_tags" : "");
    return;
  }
  name(command.table.label_column, "label");
  flags.require(
      command.mlm_probability == TrainCommand().mlm_probability && !command.whole_word_mask,
      "--mlm-probability or --whole-word-mask with --task=" + command.task, "--task fill-mask");
  const bool several =
      !command.table.label_columns.empty() || !command.table.label_separator.empty();
  std::string& problem = command.problem_type;
  const std::vector<std::string> known(kSpellings<Head>.begin(), kSpellings<Head>.begin() + 3);
  flags.require(problem.empty() || std::find(known.begin(), known.end(), problem) != known.end(),
                "--problem-type=" + problem, "one of " + joined(known),
                write_nearest(problem, known));
  if (several) {
    flags.require(problem.empty() || problem == known[2],
                  "--problem-type=" + problem + " with several labels per sample", known[2]);
    problem = known[2];
  }
  flags.require(several || problem != known[2],
                "--problem-type=" + problem + " with one label per sample",
                "--label-columns or --label-separator");
  const TrainingArguments& a = command.arguments;
  flags.require(a.label_smoothing_factor == 0 || problem.empty() || problem == known[0],
                "--label-smoothing-factor=" + flag_text(a.label_smoothing_factor) +
                    " with --problem-type=" + problem,
                known[0]);
  flags.require(a.class_weights.empty() || problem != known[1],
                "--class-weights=" + a.class_weights + " with --problem-type=" + problem,
                "a classifier");
  flags.require(a.class_weights != "balanced" || problem != known[2],
                "--class-weights=balanced with several labels per sample",
                "for each label the weight of its positive samples, e.g. 1,3");
  if (!problem.empty()) { // otherwise the model determines it
    require_metric_of(flags, a, problem);
  }
}

Command parse_train(const CommandEntry& entry, std::vector<std::string> arguments) {
  complete_checkpointing(arguments);
  TrainCommand command;
  FlagTable flags(
      entry,
      {.summary = "train or fine-tune a transformer on texts",
       .usage = "--model MODEL --output-dir FOLDER [flags]",
       .examples = {"hasten train --model bert-mini --train-file reviews.csv \\\n"
                    "    --eval-split 0.1 --nproc 2 --output-dir out",
                    "hasten train --task token-classification --model distilbert \\\n"
                    "    --train-file train.conll --eval-file dev.conll --output-dir ner",
                    "hasten train --task fill-mask --model roberta --train-file texts.csv \\\n"
                    "    --eval-split 0.1 --output-dir adapted",
                    "hasten train --task text-generation --model gpt2-mini --tokenizer gpt2 \\\n"
                    "    --train-file book.txt --sample-by paragraph --output-dir writer"},
       .notes = "Writes a model folder in the Hugging Face layout, which hasten "
                "predict, hasten eval and Python's transformers read. " +
                std::string(kEnvironmentNote)});
  declare_train_data(flags, command);
  bool print_config = false;
  declare_run(flags, command, print_config);
  declare_launch(flags, command);
  declare_batches(flags, command.arguments);
  declare_loss(flags, command.arguments);
  declare_lora(flags, command.lora);
  declare_optimizer_and_schedule(flags, command.arguments);
  declare_reports(flags, command.arguments);
  flags.read_config(arguments);
  flags.read_environment(arguments);
  settle_precision(command.arguments, [&](const char* name) { return flags.in_environment(name); });
  flags.parse(std::move(arguments));
  command.nproc_given = flags.written("--nproc");
  settle_precision(command.arguments, [&](const char* name) { return flags.written(name); });
  check_backend(flags, command.arguments);
  require_task(flags, command.task);
  check_problem(flags, command);
  check_columns(flags, command.table);
  check_lora(flags, command.lora);
  flags.require(command.lora.r == 0 || !is_model_shape(command.model),
                "--lora-r=" + std::to_string(command.lora.r) + " with --model=" + command.model,
                "a trained model, because an adapter is loaded with its base's weights");
  check_launch(flags, command);
  flags.require(command.eval_split >= 0 && command.eval_split < 1,
                "--eval-split=" + flag_text(command.eval_split),
                "a fraction, 0 or more and below 1");
  if (command.train_file.empty() && command.eval_file.empty() && !flags.given("--eval-split")) {
    command.eval_split = 0.1;
  }
  flags.require(command.report_texts == "on" || command.report_texts == "off",
                "--report-texts=" + command.report_texts, "on or off");
  flags.require(command.eval_file.empty() || command.eval_split == 0,
                "--eval-file=" + command.eval_file +
                    " and --eval-split=" + flag_text(command.eval_split) + " exclude each other",
                {}, "leave one of them out");
  flags.require(command.tokenizer.empty() || is_model_shape(command.model),
                "--tokenizer=" + command.tokenizer + " with --model=" + command.model,
                "--tokenizer only with a shape, because a folder has its own",
                "leave --tokenizer out");
  if (is_model_shape(command.model) && !flags.given("--learning-rate")) {
    command.arguments.learning_rate = 3e-4; // 5e-5 is too low for random weights
  }
  validate_arguments(flags, command.arguments);
  for (const auto& [needed, name] :
       {std::pair(command.arguments.load_best_model_at_end, "--load-best-model-at-end"),
        std::pair(command.arguments.early_stopping_patience > 0, "--early-stopping-patience")}) {
    flags.require(!needed || !command.eval_file.empty() || command.eval_split > 0,
                  std::string(name) + " without evaluation data",
                  "--eval-file FILE or --eval-split FRACTION");
  }
  if (print_config) {
    return Answer{flags.commented_config()};
  }
  command.run_config = flags.config();
  return command;
}

} // namespace hasten::detail
