#include <algorithm>

#include "flags.h"

namespace hasten::detail {

void declare_train_data(FlagTable& flags, TrainCommand& command) {
  flags.group("Model");
  flags.value("--model", command.model, "FOLDER|SHAPE",
              "Hugging Face folder (config.json, model.safetensors, vocab.txt), or a "
              "shape with random weights: " +
                  model_shapes_text());
  flags.required();
  flags.value("--tokenizer", command.tokenizer, "FOLDER",
              "vocabulary for a shape (default: learned from the training texts)");
  flags.value("--vocab-size", command.vocab_size, "PIECES", "most pieces of a learned vocabulary",
              kPieces);
  flags.flag("--cased", command.cased, "a learned vocabulary keeps upper case and accents");

  flags.group("Data");
  flags.value("--train-file,--train-data", command.train_file, "FILE",
              "rows to learn from, .csv, .tsv or .jsonl (default: 4,000 reviews made "
              "from a seed, as hasten synth reviews gives them, a tenth to evaluate on)");
  declare_table(flags, command.table, true);
  flags.value("--problem-type", command.problem_type, "NAME",
              "single_label_classification, regression (labels are numbers) or "
              "multi_label_classification (default: as the label columns and the model say)");
  flags.value("--eval-file,--eval-data", command.eval_file, "FILE", "rows to evaluate on");
  flags.value("--eval-split", command.eval_split, "SHARE",
              "share of the training rows to evaluate on instead, 0 to 1, drawn per label");
  flags.value("--max-train-rows", command.max_train_rows, "ROWS",
              "first rows that pass the filters; 0 takes all", kAnyRows);
  flags.value("--max-eval-rows", command.max_eval_rows, "ROWS",
              "first rows of --eval-file; 0 takes all", kAnyRows);
  flags.value("--cache-dir", command.cache_dir, "FOLDER",
              "token ids are kept there for later runs (default: HASTEN_CACHE, or "
              "$XDG_CACHE_HOME/hasten, or ~/.cache/hasten)");
  flags.value("--max-length", command.arguments.max_length, "TOKENS",
              "longer texts are cut; at most what the model takes");
}

void declare_precision(FlagTable& flags, TrainingArguments& arguments) {
  flags.value("--precision,--mixed-precision", arguments.precision, "NAME",
              "fp32, bf16 (matrix products in 16 bits), fp16 (the same, losses scaled) or "
              "auto: bf16 where a short probe finds it distinctly quicker on every rank");
  flags.flag("--bf16", arguments.bf16, "--precision bf16");
  flags.flag("--fp16", arguments.fp16, "--precision fp16");
}

void declare_checkpointing(FlagTable& flags, TrainingArguments& arguments) {
  flags.value("--gradient-checkpointing,--activation-checkpointing",
              arguments.gradient_checkpointing, "HOW",
              "less memory for more time: none, full (also without a value), every:K "
              "blocks, ops, budget:BYTES or budget:50%");
}

void declare_run(FlagTable& flags, TrainCommand& command) {
  TrainingArguments& arguments = command.arguments;
  flags.group("Processes and output");
  declare_processes(flags, command.nproc, command.oversubscribe);
  flags.value("--secret-file", command.secret_file, "FILE",
              "secret that lets processes on several hosts into this run; mode 0600");
  flags.value("--config", command.config, "FILE",
              "JSON object of flags by name (learning_rate), which those written here "
              "override; a run's run_config.json is one");
  flags.flag("--dry-run", command.dry_run, "print what would be done, and train nothing");
  flags.value("--output-dir", arguments.output_dir, "FOLDER",
              "receives the model, checkpoint-N folders, metrics.jsonl and records");
  flags.required();
  flags.flag("--overwrite-output-dir", arguments.overwrite_output_dir,
             "remove another run's files from the output folder first");
  flags.value("--resume-from-checkpoint", arguments.resume_from_checkpoint, "WHERE",
              "auto: go on with the run in the output folder, or begin it where there is "
              "none; latest: go on, or fail; or a checkpoint-N folder");
  flags.flag("--allow-changed-arguments", arguments.allow_changed_arguments,
             "go on although arguments that alter the run have changed");
}

/// How processes work together.
void declare_strategy(FlagTable& flags, TrainingArguments& arguments) {
  flags.value("--strategy", arguments.strategy, "NAME",
              "what each process holds of the model: ddp (all), zero1 (part of the "
              "optimizer's state), zero2 (of gradients too), fsdp (of parameters "
              "too) or hsdp (the same among --shard-size processes, copies beside)");
  declare_shard_size(flags, arguments.shard_size);
  flags.value("--local-sgd-steps", arguments.local_sgd_steps, "UPDATES",
              "processes train by themselves and average their weights after this many "
              "updates; 0: gradients are averaged in each update");
  flags.value("--ddp-timeout", arguments.ddp_timeout, "SECONDS",
              "longest wait for a process that lives but is late");
  flags.value("--heartbeat-timeout", arguments.heartbeat_timeout, "SECONDS",
              "longest until a process that died, froze or cannot be reached is named");
}

void declare_batches(FlagTable& flags, TrainingArguments& arguments) {
  flags.group("Length and batches");
  flags.value("--num-train-epochs,--epochs", arguments.num_train_epochs, "EPOCHS",
              "passes over the data; may be fractional");
  flags.value("--max-steps", arguments.max_steps, "UPDATES",
              "optimizer steps; above 0 it overrides the epochs");
  flags.value("--per-device-train-batch-size,--batch-size", arguments.per_device_train_batch_size,
              "ROWS", "rows of a micro-batch on one process");
  flags.value("--per-device-eval-batch-size", arguments.per_device_eval_batch_size, "ROWS",
              "rows of an evaluation batch on one process");
  flags.value("--gradient-accumulation-steps", arguments.gradient_accumulation_steps, "N",
              "micro-batches an update adds up");
  flags.flag("--auto-find-batch-size", arguments.auto_find_batch_size,
             "halve the micro-batch until the longest rows fit into memory, and "
             "accumulate as many more");
  flags.value("--memory-limit", arguments.memory_limit, "BYTES",
              "for it: most memory of tensors in a process, like 2GB (default: 9 tenths "
              "of what is free)");
  declare_precision(flags, arguments);
  declare_strategy(flags, arguments);
  declare_checkpointing(flags, arguments);
  flags.value(
      "--train-sampling-strategy", arguments.train_sampling_strategy, "ORDER",
      "random, sequential or group_by_length (rows of similar length together: less padding)");
  flags.flag("--dataloader-drop-last", arguments.dataloader_drop_last,
             "leave out an epoch's last, smaller batch");
  flags.value("--dataloader-num-workers", arguments.dataloader_num_workers, "THREADS",
              "background threads that make batches; any number gives the same run");
  flags.value("--dataloader-prefetch-factor", arguments.dataloader_prefetch_factor, "BATCHES",
              "that each of them makes ahead");
}

void declare_loss(FlagTable& flags, TrainingArguments& arguments) {
  flags.group("Loss");
  flags.value("--label-smoothing-factor", arguments.label_smoothing_factor, "SHARE",
              "of a label that is spread over all classes");
  flags.value(
      "--class-weights", arguments.class_weights, "W,W|balanced",
      "what rows count by label, in the labels' order; balanced: all labels the same together");
}

void declare_optimizer(FlagTable& flags, TrainingArguments& arguments) {
  flags.group("Optimizer and schedule");
  flags.value(
      "--optim", arguments.optim, "NAME",
      "adamw_torch (or adamw_torch_fused, adamw: the same), adam, sgd, adafactor, lion or lamb");
  flags.value("--optim-args", arguments.optim_args, "ARGS",
              "of the optimizer: name=value,name=value, like momentum=0.9");
  flags.value("--learning-rate,--lr", arguments.learning_rate, "RATE",
              "peak learning rate; 3e-4 for a shape");
  flags.value("--weight-decay", arguments.weight_decay, "RATE",
              "decoupled decay of all but biases and norms");
  flags.value("--adam-beta1", arguments.adam_beta1, "B", "Adam's decay of the mean");
  flags.value("--adam-beta2", arguments.adam_beta2, "B", "decay of the mean square");
  flags.value("--adam-epsilon", arguments.adam_epsilon, "E", "added to the root");
  flags.value("--max-grad-norm", arguments.max_grad_norm, "NORM",
              "longest gradient; 0 does not clip");
  flags.value("--grad-norm-type", arguments.grad_norm_type, "P",
              "norm that --max-grad-norm limits: 1, 2 or inf");
  flags.value("--max-grad-value", arguments.max_grad_value, "VALUE",
              "largest number in a gradient; 0 does not clip");
  flags.value("--lr-scheduler-type", arguments.lr_scheduler_type, "NAME",
              "linear, cosine, cosine_with_restarts, cosine_with_min_lr, polynomial, "
              "constant, constant_with_warmup, inverse_sqrt, warmup_stable_decay, "
              "reduce_lr_on_plateau or one_cycle");
  flags.value("--lr-scheduler-kwargs", arguments.lr_scheduler_kwargs, "JSON",
              "of the schedule, like '{\"num_cycles\": 2}'");
  flags.value("--warmup-steps", arguments.warmup_steps, "UPDATES",
              "updates with a rising rate; below 1: a share of all");
  flags.value("--warmup-ratio", arguments.warmup_ratio, "SHARE", "the older spelling of a share");
  flags.group("Randomness");
  flags.value("--seed", arguments.seed, "N", "new weights, dropout, split and order");
  flags.value("--data-seed", arguments.data_seed, "N", "order of the rows (default: --seed)");
}

void declare_reports(FlagTable& flags, TrainingArguments& arguments) {
  flags.group("Reports, evaluation and saves");
  flags.value("--logging-steps", arguments.logging_steps, "UPDATES",
              "updates between two records; below 1: a share of all");
  flags.value("--log-gradient-norms", arguments.log_gradient_norms, "OF",
              "norms in the records: no, layer, module or parameter");
  flags.value("--eval-strategy", arguments.eval_strategy, "WHEN", "no, steps or epoch");
  flags.value("--eval-steps", arguments.eval_steps, "UPDATES",
              "updates between evaluations for steps; below 1: a share of all");
  flags.value("--save-strategy", arguments.save_strategy, "WHEN",
              "checkpoint-N folders: no, steps or epoch");
  flags.value("--save-steps", arguments.save_steps, "UPDATES",
              "updates between saves for steps; below 1: a share of all");
  flags.value("--save-total-limit", arguments.save_total_limit, "N",
              "checkpoint-N folders kept, the best always; 0 keeps all");
  flags.flag("--save-only-model", arguments.save_only_model,
             "checkpoint-N folders hold the model alone: no run goes on from them");
  flags.flag("--load-best-model-at-end", arguments.load_best_model_at_end,
             "the final model is the best evaluation's");
  flags.value("--metric-for-best-model", arguments.metric_for_best_model, "NAME",
              "loss, or a metric of the evaluation: accuracy, f1; mse, mae, pearson, "
              "spearman (regression); f1_micro, f1_macro (several labels)");
  flags.value("--greater-is-better", arguments.greater_is_better, "true|false",
              "(default: true unless the metric is a loss)");
  flags.value("--early-stopping-patience", arguments.early_stopping_patience, "N",
              "end after N evaluations in a row without a better metric; 0: never");
  flags.value("--early-stopping-threshold", arguments.early_stopping_threshold, "BY",
              "what better must exceed");
  flags.flag("--disable-tqdm", arguments.disable_tqdm,
             "no banner, no progress bars and no table of epochs");
}

void validate_arguments(const FlagTable& flags, const TrainingArguments& arguments) {
  try {
    arguments.validate();
  } catch (const InputError& error) {
    const std::string text = error.what();
    const size_t end = text.find("] ");
    throw InputError(flags.where(),
                     flags.with_flag_names(end == std::string::npos ? text : text.substr(end + 2)));
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

/// One choice of precision on the command line stands for all of the file's.
void settle_config(const FlagTable& flags, TrainCommand& command) {
  TrainingArguments& a = command.arguments;
  const bool bf16 = flags.written("--bf16");
  const bool fp16 = flags.written("--fp16");
  if (!bf16 && !fp16 && !flags.written("--precision")) {
    return;
  }
  a.bf16 = a.bf16 && bf16;
  a.fp16 = a.fp16 && fp16;
  if (!flags.written("--precision")) {
    a.precision = Precision::no;
  }
}

void require_metric_of(const FlagTable& flags, const TrainingArguments& arguments,
                       const std::string& problem) {
  std::vector<std::string> names{"loss", "runtime", "samples_per_second", "steps_per_second"};
  const std::vector<std::string> of_problem =
      problem == "regression" ? std::vector<std::string>{"mse", "mae", "pearson", "spearman"}
      : problem == "multi_label_classification"
          ? std::vector<std::string>{"f1_micro", "f1_macro", "accuracy"}
          : std::vector<std::string>{"accuracy", "f1"};
  names.insert(names.end(), of_problem.begin(), of_problem.end());
  const std::string wanted = arguments.best_metric_name().substr(5);
  if (std::find(names.begin(), names.end(), wanted) == names.end()) {
    throw InputError(flags.where(), "--metric-for-best-model=" + arguments.metric_for_best_model,
                     "one of loss, " + joined(of_problem), write_nearest(wanted, names));
  }
}

/// What the head is for, and that the flags agree on it.
void check_problem(const FlagTable& flags, TrainCommand& command) {
  const bool several =
      !command.table.label_columns.empty() || !command.table.label_separator.empty();
  std::string& problem = command.problem_type;
  const std::vector<std::string> known(kSpellings<Head>.begin(), kSpellings<Head>.end());
  if (!problem.empty() && std::find(known.begin(), known.end(), problem) == known.end()) {
    throw InputError(flags.where(), "--problem-type=" + problem, "one of " + joined(known),
                     write_nearest(problem, known));
  }
  if (several) {
    require_flag(flags, problem.empty() || problem == known[2],
                 "--problem-type=" + problem + " with several labels a row", known[2]);
    problem = known[2];
  }
  require_flag(flags, several || problem != known[2],
               "--problem-type=" + problem + " with one label a row",
               "--label-columns or --label-separator");
  const TrainingArguments& a = command.arguments;
  require_flag(flags, a.label_smoothing_factor == 0 || problem.empty() || problem == known[0],
               "--label-smoothing-factor=" + flag_text(a.label_smoothing_factor) +
                   " with --problem-type=" + problem,
               known[0]);
  require_flag(flags, a.class_weights.empty() || problem != known[1],
               "--class-weights=" + a.class_weights + " with --problem-type=" + problem,
               "a classifier");
  require_flag(flags, a.class_weights != "balanced" || problem != known[2],
               "--class-weights=balanced with several labels a row",
               "what a label's rows weigh against those without it, like 1,3");
  if (!problem.empty()) { // else the model says
    require_metric_of(flags, a, problem);
  }
}

Command parse_train(std::vector<std::string> arguments) {
  complete_checkpointing(arguments);
  TrainCommand command;
  FlagTable flags({.name = "train",
                   .summary = "fine-tune a text classifier of the BERT family",
                   .usage = "--model MODEL --output-dir FOLDER [flags]",
                   .examples = {"hasten train --model bert-mini --train-file reviews.csv \\\n"
                                "    --eval-split 0.1 --nproc 2 --output-dir out"},
                   .notes = "Leaves a model folder in the Hugging Face layout that hasten "
                            "predict, hasten eval and Python's transformers read."});
  declare_train_data(flags, command);
  declare_run(flags, command);
  declare_logs(flags, command.logs);
  declare_batches(flags, command.arguments);
  declare_loss(flags, command.arguments);
  declare_optimizer(flags, command.arguments);
  declare_reports(flags, command.arguments);
  flags.read_config(arguments);
  flags.parse(std::move(arguments));
  command.nproc_given = flags.written("--nproc");
  settle_config(flags, command);
  check_problem(flags, command);
  check_columns(flags, command.table);
  check_logs(flags, command.logs, command.nproc);
  require_flag(flags, command.eval_split >= 0 && command.eval_split < 1,
               "--eval-split=" + flag_text(command.eval_split), "a share, 0 or more and below 1");
  if (command.train_file.empty() && command.eval_file.empty() && !flags.given("--eval-split")) {
    command.eval_split = 0.1;
  }
  if (!command.eval_file.empty() && command.eval_split > 0) {
    throw InputError(flags.where(),
                     "--eval-file=" + command.eval_file + " and --eval-split=" +
                         flag_text(command.eval_split) + " exclude each other",
                     {}, "leave one of them out");
  }
  if (!command.tokenizer.empty() && !is_model_shape(command.model)) {
    throw InputError(
        flags.where(), "--tokenizer=" + command.tokenizer + " with --model=" + command.model,
        "--tokenizer only beside a shape: a folder brings its own", "leave --tokenizer out");
  }
  if (is_model_shape(command.model) && !flags.given("--learning-rate")) {
    command.arguments.learning_rate = 3e-4; // 5e-5 hardly moves random weights
  }
  validate_arguments(flags, command.arguments);
  for (const auto& [needed, name] :
       {std::pair(command.arguments.load_best_model_at_end, "--load-best-model-at-end"),
        std::pair(command.arguments.early_stopping_patience > 0, "--early-stopping-patience")}) {
    if (needed && command.eval_file.empty() && command.eval_split == 0) {
      throw InputError(flags.where(), std::string(name) + " without rows to evaluate on",
                       "--eval-file FILE or --eval-split SHARE");
    }
  }
  command.run_config = flags.config();
  return command;
}

} // namespace hasten::detail
