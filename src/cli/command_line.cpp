#include <algorithm>
#include <filesystem>

#include "commands.h"
#include "flags.h"

namespace hasten {

namespace detail {

// Flags that predict and eval share, around the file's own.
void declare_model(FlagTable& flags, ModelFlags& command, const char* group) {
  flags.group(group);
  flags.value("--model", command.model, "FOLDER|NAME",
              "output of hasten train, or another trained model in the Hugging Face layout, or the "
              "name of one on Hugging Face's hub");
  flags.required();
  declare_offline(flags, command.offline);
  flags.value("--task", command.task, "NAME",
              joined(task_choices()) + " (default: that of the model's head)");
}

void declare_rows(FlagTable& flags, ModelFlags& command, bool labels) {
  declare_table(flags, command.table, labels);
  flags.value("--max-rows", command.max_rows, "SAMPLES",
              "use only the first SAMPLES of the file; 0 uses all", kAnyRows);
  flags.group("Output");
}

void declare_batches(FlagTable& flags, ModelFlags& command) {
  flags.group("Batches");
  flags.value("--batch-size", command.batch_size, "SAMPLES", "samples per batch", kBatchRows);
  flags.value("--max-length", command.max_length, "TOKENS",
              "truncate longer texts; 0: as in training, or the model's limit", kTokens);
}

/// `path`: of a file of predictions; empty: none.
void require_table_name(const FlagTable& flags, const std::string& flag, const std::string& path) {
  const std::string end = std::filesystem::path(path).extension().string();
  flags.require(path.empty() || end == ".csv" || end == ".jsonl", flag + "=" + path,
                "a file name that ends in .csv or .jsonl");
}

Command parse_predict(const CommandEntry& entry, std::vector<std::string> arguments) {
  PredictCommand command;
  FlagTable flags(entry,
                  {.usage = "--model FOLDER [TEXT... | --file FILE | -] [flags]",
                   .examples = {"hasten predict --model out \"what a film\" \"two hours wasted\"",
                                "hasten predict --model out --file new.csv --output preds.csv"},
                   .notes = "Prints a label and probabilities for each text, in the order of "
                            "the input. token-classification prints the entities of each text, or "
                            "a tag for each word of --file; fill-mask prints tokens for each mask. "
                            "- reads one text per line from stdin."});
  declare_model(flags, command, "Model and texts");
  flags.value("--file", command.file, "FILE,...",
              "texts, .csv, .tsv or .jsonl, also .gz; several files with commas or as a pattern");
  declare_rows(flags, command, false);
  flags.value("--output", command.output, "FILE", "write .csv or .jsonl instead of printing");
  flags.flag("--json", command.json, "print one JSON object per line");
  flags.flag("--with-logits", command.with_logits,
             "text-classification: add logits and input_ids to JSON");
  flags.value("--top-k", command.top_k, "N", "fill-mask: tokens for each mask",
              NumberRange{1, 10'000});
  declare_batches(flags, command);
  command.texts = flags.parse_words(std::move(arguments));
  flags.require(command.texts.empty() != command.file.empty(),
                command.file.empty() ? "no text and no --file"
                                     : "--file=" + command.file + " together with a text",
                "texts, or --file FILE, or - for stdin");
  const std::string& output = command.output;
  require_task(flags, command.task);
  require_table_name(flags, "--output", output);
  flags.require(
      !command.with_logits || (output.empty() ? command.json : output.ends_with(".jsonl")),
      "--with-logits without JSON", "--json, or --output with a name that ends in .jsonl");
  return command;
}

Command parse_eval(const CommandEntry& entry, std::vector<std::string> arguments) {
  EvalCommand command;
  Precision precision = Precision::no;
  FlagTable flags(entry, {.usage = "--model FOLDER --file FILE [flags]",
                          .examples = {"hasten eval --model out --file test.csv --json",
                                       "hasten eval --model out --file test.csv --nproc 2 \\\n"
                                       "    --predictions wrong.csv"},
                          .notes = kEnvironmentNote});
  declare_model(flags, command, "Model and data");
  flags.value(
      "--file", command.file, "FILE,...",
      "labelled samples, .csv, .tsv or .jsonl, also .gz; several files with commas or as a pattern");
  flags.required();
  declare_rows(flags, command, true);
  flags.flag("--json", command.json, "print one JSON object");
  flags.value("--predictions", command.predictions, "FILE",
              "text-classification: write each sample's text, label, prediction and "
              "probabilities, .csv or .jsonl");
  declare_batches(flags, command);
  flags.value("--precision,--mixed-precision", precision, "NAME",
              "fp32, bf16, fp16 or auto (default: as in training)");
  flags.group("Processes");
  declare_processes(flags, command.nproc, command.oversubscribe);
  flags.read_environment(arguments);
  flags.parse(std::move(arguments));
  if (flags.given("--precision")) {
    command.precision = precision;
  }
  require_task(flags, command.task);
  require_table_name(flags, "--predictions", command.predictions);
  check_columns(flags, command.table);
  return command;
}

void declare_launch(FlagTable& flags, ProcessFlags& processes) {
  declare_nodes(flags, processes);
  flags.group("Signals and restarts");
  flags.value("--signals-to-handle", processes.signals_to_handle, "NAME,...",
              "signals to pass on to the processes; they then end the run");
  flags.value("--max-restarts", processes.max_restarts, "N",
              "only 0: hasten restarts no process; start hasten train again with "
              "--resume-from-checkpoint latest instead");
  LogsSpecs& logs = processes.logs;
  flags.group("Output of the processes");
  flags.value("--local-ranks-filter", logs.local_ranks_filter, "RANK,...",
              "print only the output of these processes; files are not affected");
  flags.value("--log-dir", logs.log_dir, "FOLDER",
              "folder for RANK/stdout.log and RANK/stderr.log; without --redirects and "
              "--tee it implies --tee 3");
  flags.value("--redirects", logs.redirects, "STREAMS",
              "write these streams only to --log-dir: 1 stdout, 2 stderr, 3 both; or for "
              "some ranks, e.g. 1:3,2:3");
  flags.value("--tee", logs.tee, "STREAMS",
              "print these streams line by line with the rank as prefix, and also write "
              "them to --log-dir, if given");
}

void check_launch(const FlagTable& flags, ProcessFlags& processes) {
  settle_nodes(flags, processes);
  flags.require(
      processes.max_restarts == 0, "--max-restarts=" + std::to_string(processes.max_restarts),
      "0, because hasten does not restart ranks",
      "start the run again; hasten train resumes it with --resume-from-checkpoint latest");
  const LogsSpecs& logs = processes.logs;
  flags.require(!logs.redirects.any() || !logs.log_dir.empty(), "--redirects without --log-dir",
                "--log-dir FOLDER for the files");
  const auto check_rank = [&](const char* what, int highest) {
    flags.require(
        highest < processes.nproc,
        what + std::to_string(highest) + " with --nproc=" + std::to_string(processes.nproc),
        "ranks below --nproc");
  };
  for (const RankStreams* streams : {&logs.redirects, &logs.tee}) {
    check_rank("streams of rank ", streams->ranks.empty() ? -1 : streams->ranks.rbegin()->first);
  }
  const auto& filter = logs.local_ranks_filter;
  check_rank("--local-ranks-filter has rank ", filter.empty() ? -1 : *filter.rbegin());
}

Command parse_launch(const CommandEntry& entry, std::vector<std::string> arguments) {
  LaunchCommand command;
  FlagTable flags(
      entry,
      {.usage = "--nproc N PROGRAM [ARGUMENT...]",
       .examples = {"hasten launch --nproc 2 ./my_training --epochs 3",
                    "hasten launch --nproc 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 \\\n"
                    "    --secret-file run.secret ./my_training",
                    "hasten launch --nproc 2 --nnodes 2 --rdzv-endpoint host0:29500 ./my_training"},
       .notes = "Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT in its environment, as under torchrun, "
                "and OMP_NUM_THREADS, its share of the allowed cores, unless that "
                "is set. When one fails all are ended, and the first that failed "
                "is named, with what it said of it. TORCHELASTIC_LOG_LINE_PREFIX_"
                "TEMPLATE in the environment is the prefix of --tee, by default [rank${rank}]:."});
  flags.group("Processes");
  declare_processes(flags, command.nproc, command.oversubscribe, true);
  flags.flag(
      "--keep-going", command.keep_going,
      "let the others go on when one fails that is not rank 0: for programs that survive it");
  declare_launch(flags, command);
  command.argv = flags.parse_words(std::move(arguments), true);
  check_launch(flags, command);
  flags.require(!command.argv.empty(), "no program",
                "hasten launch --nproc N PROGRAM [ARGUMENT...]");
  return command;
}

/// --model of the commands that take a folder or a shape; required.
void declare_folder_or_shape(FlagTable& flags, std::string& model, bool& offline) {
  flags.value("--model", model, "FOLDER|NAME|SHAPE",
              "Hugging Face folder, the name of a repository on Hugging Face's hub, or a shape: " +
                  model_shapes_text());
  flags.required();
  declare_offline(flags, offline);
}

/// "8x128".
void read_batch(const FlagTable& flags, const std::string& text, int64_t& rows, int64_t& tokens) {
  const auto numbers = split(text, "x");
  flags.require(numbers.size() == 2 && read_flag(numbers[0], rows) &&
                    read_flag(numbers[1], tokens) && kBatchRows.holds(rows) && tokens > 0 &&
                    kTokens.holds(tokens),
                "--batch=" + text, "samples and tokens, both above 0, e.g. 8x128");
}

Command parse_state(const CommandEntry& entry, std::vector<std::string> arguments) {
  StateCommand command;
  FlagTable flags(entry, {.usage = "inspect FOLDER | consolidate FOLDER... [flags]",
                          .examples = {"hasten state inspect out/checkpoint-100",
                                       "hasten state consolidate out/checkpoint-100 \\\n"
                                       "    --output model.safetensors"},
                          .notes = "FOLDER is a checkpoint of hasten train or of "
                                   "Accelerator::save_state, of any strategy. consolidate "
                                   "writes the unsharded model as one safetensors file. If hosts "
                                   "saved on their own disks, pass one FOLDER of each host."});
  flags.group("Output");
  flags.value("--output", command.output, "FILE", "consolidate: the .safetensors file to write");
  flags.value("--model-index", command.model, "N", "consolidate: which of several models",
              NumberRange{0, 1'000'000});
  flags.flag("--json", command.json, "inspect: print one JSON object");
  auto words = flags.parse_words(std::move(arguments));
  flags.require((words.size() == 2 && words[0] == "inspect") ||
                    (words.size() >= 2 && words[0] == "consolidate"),
                words.empty() ? "no action and no folder" : joined(words, " "),
                "inspect FOLDER or consolidate FOLDER...");
  command.action = words[0];
  command.folders.assign(words.begin() + 1, words.end());
  flags.require((command.action == "consolidate") != command.output.empty(),
                "--output=" + command.output + " with " + command.action,
                "a file with consolidate, none with inspect");
  return command;
}

Command parse_plan(const CommandEntry& entry, std::vector<std::string> arguments) {
  PlanCommand command;
  std::string batch;
  std::string budget;
  FlagTable flags(entry,
                  {.usage = "--model MODEL --batch SAMPLESxTOKENS [flags]",
                   .examples = {"hasten plan --model bert-base --batch 8x128 --budget 50%"},
                   .notes = "Measures the model's blocks and prints the fastest plans, "
                            "from the least memory to no recomputation. hasten train "
                            "--gradient-checkpointing budget:50% makes and uses such a plan."});
  flags.group("Model and batch");
  declare_folder_or_shape(flags, command.model, command.offline);
  flags.value("--task", command.task, "NAME", joined(task_choices()));
  flags.value("--batch", batch, "SAMPLESxTOKENS", "one batch of one process, e.g. 8x128");
  flags.required();
  flags.value("--budget", budget, "BYTES|PERCENT",
              "memory for activations: e.g. 2GB, or 50% of what they take without recomputation");
  declare_lora(flags, command.lora);
  flags.group("Output");
  flags.value("--json", command.json, "FILE", "write the plan to FILE");
  flags.value("--svg", command.svg, "FILE", "write a plot of peak memory against time");
  flags.parse(std::move(arguments));
  require_task(flags, command.task);
  check_lora(flags, command.lora);
  read_batch(flags, batch, command.rows, command.tokens);
  if (!budget.empty()) {
    flags.require(read_flag("budget:" + budget, command.budget), "--budget=" + budget,
                  "bytes above 0 (2GB) or a percentage up to 100%");
  }
  flags.require(command.json.empty() || !budget.empty(),
                "--json=" + command.json + " without a budget", "--budget BYTES|PERCENT");
  return command;
}

/// `hsdp`: the command uses the strategy hsdp.
void require_shard_size(const FlagTable& flags, int64_t shard_size, bool hsdp, int nproc) {
  flags.require(shard_size == 0 || (hsdp && shard_size > 0 && nproc % shard_size == 0),
                "--shard-size=" + std::to_string(shard_size),
                "a divisor of --nproc, with strategy hsdp only");
}

Command parse_estimate_memory(const CommandEntry& entry, std::vector<std::string> arguments) {
  EstimateMemoryCommand command;
  TrainingArguments& training = command.arguments;
  std::string batch;
  FlagTable flags(
      entry, {.usage = "--model MODEL [flags]",
              .examples = {"hasten estimate-memory --model bert-base --batch 8x128 \\\n"
                           "    --optim adamw --bf16 --strategy fsdp --nproc 4"},
              .notes = "Prints the peak memory of CPU tensors in a step. Scratch memory "
                       "of libraries and the program itself (about 200 MiB) are not included."});
  flags.group("Model and batch");
  declare_folder_or_shape(flags, command.model, command.offline);
  flags.value("--task", command.task, "NAME", joined(task_choices()));
  flags.value("--vocab-size", command.vocab_size, "PIECES", "vocabulary of a shape",
              NumberRange{1, kPieces.most});
  flags.value("--num-labels", command.num_labels, "N", "number of labels of a shape",
              NumberRange{2, 1'048'576});
  flags.value("--batch", batch, "SAMPLESxTOKENS",
              "one micro-batch of one process, e.g. 8x128 (default: without activations)");
  flags.value("--gradient-accumulation-steps", training.gradient_accumulation_steps, "N",
              "micro-batches per step", NumberRange{1, 1'048'576});
  flags.group("Training");
  declare_optimizer(flags, training);
  flags.flag("--bf16", training.bf16, "matrix products in 16 bits");
  flags.value("--strategy", command.strategy, "NAME", "ddp, zero1, zero2, fsdp, hsdp or local_sgd");
  declare_shard_size(flags, training.shard_size);
  flags.value("--nproc", command.nproc, "N", "processes on this machine", kProcesses);
  declare_lora(flags, command.lora);
  flags.group("Output");
  flags.flag("--json", command.json, "print one JSON object");
  flags.parse(std::move(arguments));
  require_task(flags, command.task);
  check_lora(flags, command.lora);
  if (!batch.empty()) {
    read_batch(flags, batch, command.rows, command.tokens);
  }
  const auto strategy = spelled<Strategy>(command.strategy);
  flags.require(command.strategy == "local_sgd" || strategy, "--strategy=" + command.strategy,
                "ddp, zero1, zero2, fsdp, hsdp or local_sgd");
  command.strategy = strategy ? spelling(*strategy) : command.strategy;
  require_shard_size(flags, training.shard_size, command.strategy == "hsdp", command.nproc);
  return command;
}

/// A comma-separated list of any spellings of --strategy.
std::vector<Strategy> read_strategies(const FlagTable& flags, const std::string& text) {
  std::vector<Strategy> found;
  for (const std::string& name : split(text)) {
    Strategy strategy{};
    flags.require(read_flag(name, strategy),
                  "--strategies=" + text + ": \"" + name + "\" is not a strategy",
                  flag_expectation<Strategy>(), write_nearest(name, spelling_names<Strategy>()));
    flags.require(std::ranges::find(found, strategy) == found.end(),
                  "--strategies=" + text + ": " + name + " twice", "each strategy once");
    found.push_back(strategy);
  }
  return found;
}

void check_compared(const FlagTable& flags, const CompareCommand& command) {
  const auto& strategies = command.strategies;
  const TrainingArguments& arguments = command.arguments;
  flags.require(
      command.nproc >= 2,
      "--nproc=" + std::to_string(command.nproc) + ": strategies differ only on several processes",
      "2 or more");
  require_shard_size(flags, arguments.shard_size,
                     std::ranges::find(strategies, Strategy::hsdp) != strategies.end(),
                     command.nproc);
  flags.require(arguments.gradient_checkpointing.mode() != GradientCheckpointing::Mode::budget,
                "--gradient-checkpointing=" + arguments.gradient_checkpointing.text() +
                    ": a budget needs a known batch size",
                "none, full, every:K or ops");
}

int64_t read_memory_limit(const FlagTable& flags, const std::string& text) {
  try {
    return text.empty() ? 0 : parse_bytes(text);
  } catch (const InputError&) {
    throw InputError(flags.where(), "--memory-limit=" + text,
                     "bytes above 0, e.g. 2G, 2GB or 512MiB");
  }
}

Command parse_compare(const CommandEntry& entry, std::vector<std::string> arguments) {
  complete_checkpointing(arguments);
  CompareCommand command;
  TrainingArguments& training = command.arguments;
  training.save_strategy = SaveStrategy::no;
  std::string strategies = "ddp,zero2,fsdp";
  std::string memory_limit;
  FlagTable flags(entry,
                  {.usage = "--model MODEL [flags]",
                   .examples = {"hasten compare --model bert-mini --nproc 2 \\\n"
                                "    --strategies ddp,zero2,fsdp --memory-limit 2G"},
                   .notes = "Trains a classifier on synthetic samples, with each "
                            "strategy in a separate world under the memory limit. Finds the "
                            "largest batch that fits, times it, and recommends a strategy."});
  flags.group("Model and batches");
  declare_folder_or_shape(flags, command.model, command.offline);
  flags.value("--vocab-size", command.vocab_size, "PIECES", "vocabulary of a shape",
              NumberRange{2, kPieces.most});
  flags.value("--max-length", training.max_length, "TOKENS",
              "tokens of every sample; at most the model's limit");
  flags.value("--gradient-accumulation-steps", training.gradient_accumulation_steps, "N",
              "micro-batches per step");
  flags.value("--max-batch-size", command.max_batch_size, "SAMPLES",
              "largest micro-batch to try on a process", kBatchRows);
  flags.group("Processes");
  declare_processes(flags, command.nproc, command.oversubscribe);
  flags.value("--strategies", strategies, "NAME,...",
              "strategies to compare, as in hasten train --strategy");
  declare_shard_size(flags, training.shard_size);
  declare_backend(flags, training);
  flags.group("Training");
  flags.value("--memory-limit", memory_limit, "BYTES",
              "limit of tensor memory per process, e.g. 2G (default: 90 % of the device's "
              "free memory, divided by the processes that share it)");
  declare_precision(flags, training);
  declare_checkpointing(flags, training);
  declare_optimizer(flags, training);
  flags.value("--steps", command.steps, "STEPS", "steps to time for each strategy",
              NumberRange{1, 1'000'000});
  flags.group("Output");
  flags.value("--json", command.json, "FILE", "write the results to FILE");
  flags.parse(std::move(arguments));
  command.strategies = read_strategies(flags, strategies);
  command.memory_limit_bytes = read_memory_limit(flags, memory_limit);
  check_compared(flags, command);
  check_backend(flags, training);
  if (training.shard_size > 0) {
    training.strategy = Strategy::hsdp; // shard_size is valid with hsdp only
  }
  validate_arguments(flags, training);
  return command;
}

Command parse_synth(const CommandEntry& entry, std::vector<std::string> arguments) {
  SynthCommand command;
  FlagTable flags(
      entry, {.usage = "reviews [flags]",
              .examples = {"hasten synth reviews --rows 4000 --output reviews.csv"},
              .notes = "Columns: text, label (negative, positive) and product. A review's "
                       "label depends on negations and on which half of a sentence counts, "
                       "so counting words is not enough. A seed gives the same reviews on "
                       "every machine. A larger number of reviews begins with the same ones."});
  flags.group("Reviews");
  flags.value("--rows", command.rows, "N", "number of reviews", NumberRange{1, 10'000'000});
  flags.value("--seed", command.seed, "N", "random seed");
  flags.group("Output");
  flags.value("--output", command.output, "FILE", ".csv, .tsv or .jsonl (default: CSV on stdout)");
  auto words = flags.parse_words(std::move(arguments));
  flags.require(words.size() == 1 && words.front() == "reviews",
                words.empty() ? "the kind of data is missing" : "kind of data: " + words.back(),
                "reviews, and nothing else");
  const std::string extension = std::filesystem::path(command.output).extension();
  flags.require(
      command.output.empty() || extension == ".csv" || extension == ".tsv" || extension == ".jsonl",
      "--output=" + command.output, "a file name that ends in .csv, .tsv or .jsonl");
  return command;
}

Command parse_env(const CommandEntry& entry, std::vector<std::string> arguments) {
  EnvCommand command;
  FlagTable flags(entry, {.usage = "[flags]",
                          .examples = {"hasten env --json", "hasten env --nproc 2"},
                          .notes = "With --nproc it also measures, in a second, the latency alpha "
                                   "and the time per byte beta of each collective between the "
                                   "processes, for each back end."});
  flags.group("Processes");
  declare_processes(flags, command.nproc, command.oversubscribe);
  flags.group("Output");
  flags.flag("--json", command.json, "print one JSON object");
  flags.parse(std::move(arguments));
  return command;
}

/// "--learning_rate=1e-4" as "--learning-rate=1e-4".
std::string with_dashes(std::string argument) {
  if (argument.rfind("--", 0) == 0) {
    const size_t end = std::min(argument.find('='), argument.size());
    std::replace(argument.begin(), argument.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
  }
  return argument;
}

constexpr CommandEntry kCommands[] = {
    {"train", "fine-tune a transformer on texts in CSV, TSV, JSON lines, CoNLL", parse_train},
    {"predict", "label texts, find entities or fill masks with a trained model", parse_predict},
    {"generate", "continue prompts with a language model", parse_generate},
    {"eval", "loss, metrics and scores of each label on a file", parse_eval},
    {"plan", "choose which activations to recompute under a memory budget", parse_plan},
    {"estimate-memory", "estimate the memory of training a model, without a run",
     parse_estimate_memory},
    {"compare", "compare strategies: largest batch and samples/s in a memory limit", parse_compare},
    {"state", "inspect a checkpoint, or merge its shards into one model file", parse_state},
    {"merge", "write a whole model of a LoRA adapter and its base", parse_merge},
    {"export", "write a PyTorch model as a graph that hasten trains, by Python, once",
     parse_export},
    {"tokenizer", "learn a WordPiece vocabulary from texts", parse_tokenizer},
    {"synth", "generate customer reviews from a seed", parse_synth},
    {"download", "fetch a model of Hugging Face's hub into its cache", parse_download},
    {"report", "write an HTML page of one run, or of several side by side", parse_report},
    {"launch", "run a program as N processes of one world", parse_launch},
    {"env", "versions, cores, threads and back ends of this machine", parse_env}};

std::string program_help() {
  std::string text = "hasten " HASTEN_VERSION
                     ": train LibTorch models over several processes\n\n"
                     "Usage: hasten COMMAND [flags]\n\nCommands:\n";
  for (const auto& [name, help, parse] : kCommands) {
    const std::string line = std::string("  ") + name;
    text += line + (line.size() < 10 ? "" : "\n") +
            std::string(line.size() < 10 ? 11 - line.size() : 11, ' ') + help + "\n";
  }
  return text +
         "\n"
         "Flags:\n"
         "  -h --help     print this text; hasten COMMAND --help lists a command's flags\n"
         "  --version     print the version\n"
         "\n"
         "Results go to stdout, progress and messages to stderr.\n"
         "Exit codes: 0 ok, 1 training failed, 2 bad input, 128+n signal n (130: Ctrl-C)\n";
}

const CommandEntry& command_named(const std::string& name) {
  std::vector<std::string> names;
  for (const CommandEntry& entry : kCommands) {
    if (name == entry.name) {
      return entry;
    }
    names.emplace_back(entry.name);
  }
  const std::string fix = write_nearest(name, names);
  const std::string last = std::exchange(names.back(), {});
  names.pop_back();
  throw InputError("cli::hasten", "unknown command: " + name, joined(names) + " or " + last,
                   fix.empty() ? "see hasten --help" : "write hasten" + fix.substr(5));
}

std::span<const CommandEntry> commands() { return kCommands; }

std::vector<FlagRow> flags_of(const std::string& command) {
  for (const CommandEntry& entry : kCommands) {
    try {
      if (command == entry.name) {
        entry.parse(entry, {"--help"});
      }
    } catch (const HelpAsked& help) {
      return help.flags;
    }
  }
  return {};
}

} // namespace detail

const std::vector<std::string>& task_choices() {
  static const std::vector<std::string> tasks{"text-classification", "token-classification",
                                              "fill-mask", "text-generation"};
  return tasks;
}

const std::vector<std::string>& model_shapes() {
  static const auto shapes =
      split("bert-tiny,bert-mini,bert-small,bert-base,gpt2-mini,gpt2-small,llama-mini,llama-small");
  return shapes;
}

std::string model_shapes_text() { return joined(model_shapes()); }

bool is_model_shape(const std::string& model) {
  return std::ranges::find(model_shapes(), model) != model_shapes().end();
}

Command parse_command_line(const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
    return Answer{detail::program_help()};
  }
  if (arguments[0] == "--version") {
    return Answer{"hasten " HASTEN_VERSION "\n"};
  }
  if (arguments[0] == "completion") { // not in the table: shells call it
    return Answer{detail::completion({arguments.begin() + 1, arguments.end()})};
  }
  const detail::CommandEntry& command = detail::command_named(arguments[0]);
  std::vector<std::string> words(arguments.begin() + 1, arguments.end());
  if (command.parse != detail::parse_launch) { // its program has its own flags
    std::transform(words.begin(), std::ranges::find(words, "--"), words.begin(),
                   detail::with_dashes);
  }
  try {
    return command.parse(command, std::move(words));
  } catch (const detail::HelpAsked& help) {
    return Answer{help.text};
  }
}

} // namespace hasten
