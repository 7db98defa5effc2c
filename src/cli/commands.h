// What the user asked for on the command line, and how it is read. Both programs
// use it: `hasten`, which answers or checks and hands over, and `hasten-worker`,
// which does the work. Flags are declared once, in src/cli/command_line.cpp.
//
// Without LibTorch. Threading: none needed.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "hasten/data/problem_type.h"
#include "hasten/launch/launch.h"
#include "hasten/trainer/training_arguments.h"

namespace hasten {

/// How the columns of a CSV or TSV file are read.
struct TableFlags {
  std::string text_column = "text";
  std::string label_column = "label";
  /// Several labels a row: columns of 0 and 1, "NAME,NAME,…"; or one column whose
  /// field names them with this between.
  std::string label_columns{};
  std::string label_separator{};
  /// '\0': tab for .tsv and .tab, else comma.
  char delimiter = '\0';
  bool no_header = false;
  /// "column=value", all must hold.
  std::vector<std::string> filters{};
};

/// What a model's head is for.
using Head = ProblemType;

/// hasten train: fine-tunes a text classifier.
struct TrainCommand {
  /// A Hugging Face folder, or the name of a shape (model_shapes()).
  std::string model{};
  /// Folder whose vocabulary a shape takes; empty: learned from the texts.
  std::string tokenizer{};
  /// Pieces a learned vocabulary has at most.
  int64_t vocab_size = 30522;
  /// A learned vocabulary keeps upper case and accents.
  bool cased = false;

  /// Empty: synthetic reviews (hasten/data/synthetic_reviews.h).
  std::string train_file{};
  std::string eval_file{};
  /// Share of train_file's rows, [0, 1); 0 evaluates on nothing.
  double eval_split = 0.0;
  TableFlags table{};
  /// Rows at most; 0 takes all.
  int64_t max_train_rows = 0;
  int64_t max_eval_rows = 0;
  /// Where token ids are kept; empty as cache_folder() says.
  std::string cache_dir{};

  /// single_label_classification, regression, multi_label_classification; empty: as
  /// the label columns and the model say.
  std::string problem_type{};

  /// Processes on this machine, >= 1.
  int nproc = 1;
  /// True where --nproc was written.
  bool nproc_given = false;
  /// More than 16 processes a core.
  bool oversubscribe = false;
  /// Where the output of several processes goes.
  LogsSpecs logs{};
  /// File of the secret by which ranks on several hosts know each other; empty: as
  /// HASTEN_SECRET and HASTEN_SECRET_FILE say.
  std::string secret_file{};

  /// JSON file that set what the command line does not; empty: none.
  std::string config{};
  /// All values, as a file that --config reads: the run's run_config.json.
  std::string run_config{};
  /// Prints what would be done and does nothing of it.
  bool dry_run = false;

  TrainingArguments arguments{};
};

/// hasten predict: labels for texts.
struct PredictCommand {
  std::string model{};
  /// As given; a single "-" reads lines from stdin.
  std::vector<std::string> texts{};
  std::string file{};
  TableFlags table{};
  int64_t max_rows = 0;
  /// .csv or .jsonl; empty prints to stdout.
  std::string output{};
  bool json = false;
  bool with_logits = false;
  int64_t batch_size = 32;
  /// Tokens a text is cut to; 0: as in training, or the model's limit.
  int64_t max_length = 0;
};

/// hasten eval: loss, accuracy and F1 on a labelled file.
struct EvalCommand {
  std::string model{};
  std::string file{};
  TableFlags table{};
  int64_t max_rows = 0;
  bool json = false;
  int64_t batch_size = 32;
  int64_t max_length = 0;
};

/// hasten plan: what to recompute under a budget of activation bytes.
struct PlanCommand {
  /// A Hugging Face folder, or the name of a shape.
  std::string model{};
  /// Rows and tokens of one batch of one process.
  int64_t rows = 0;
  int64_t tokens = 0;
  /// Unset: the curve of plans alone.
  GradientCheckpointing budget{};
  /// Files for the plan and for the picture; empty writes none.
  std::string json{};
  std::string svg{};
};

/// hasten estimate-memory: what training takes, without a run.
struct EstimateMemoryCommand {
  /// A Hugging Face folder (its config.json alone is read), or a shape.
  std::string model{};
  /// Of a shape.
  int64_t vocab_size = 30522;
  int64_t num_labels = 2;
  /// Rows and tokens of one micro-batch of one process; 0: without activations.
  int64_t rows = 0;
  int64_t tokens = 0;
  int64_t gradient_accumulation_steps = 1;
  OptimizerType optim = OptimizerType::adamw_torch;
  std::string optim_args{};
  /// Matrix products in bf16; parameters stay fp32.
  bool bf16 = false;
  /// ddp, zero1, zero2, fsdp or local_sgd; with one process the same.
  std::string strategy = "ddp";
  int64_t shard_size = 0;
  int nproc = 1;
  bool json = false;
};

/// hasten compare: largest batch and samples a second of strategies under a limit of
/// memory.
struct CompareCommand {
  /// A Hugging Face folder, or a shape.
  std::string model{};
  /// Of a shape.
  int64_t vocab_size = 30522;
  /// Processes on this machine, >= 2.
  int nproc = 2;
  bool oversubscribe = false;
  /// In the order given, each once.
  std::vector<Strategy> strategies{};
  /// Most bytes of tensors in a process; 0: nine tenths of what the host has left,
  /// shared by the processes.
  int64_t memory_limit_bytes = 0;
  /// Rows tried at most, of a micro-batch of one process.
  int64_t max_batch_size = 1024;
  /// Updates that are timed.
  int64_t steps = 5;
  /// File for the results; empty writes none.
  std::string json{};
  /// Of these: max_length, accumulation, precision, checkpointing and optimizer.
  TrainingArguments arguments{};
};

/// hasten state: looks into a saved state, or puts a model together from it.
struct StateCommand {
  /// inspect or consolidate.
  std::string action{};
  /// A checkpoint, or another folder of Accelerator::save_state.
  std::string folder{};
  /// Of consolidate: the safetensors file to write.
  std::string output{};
  /// Of consolidate: which of the state's models.
  int64_t model = 0;
  bool json = false;
};

/// hasten tokenizer: learns a WordPiece vocabulary, or prints texts as ids.
struct TokenizerCommand {
  /// train or encode.
  std::string action{};
  /// Text files (one text a line), or .csv, .tsv and .jsonl with a text column.
  std::vector<std::string> files{};
  /// Of train: the folder that receives the tokenizer.
  std::string output{};
  /// Of encode: the folder it is read from, and tokens a text is cut to; 0: none.
  std::string tokenizer{};
  int64_t max_length = 0;
  std::string text_column = "text";
  int64_t vocab_size = 30522;
  int64_t min_frequency = 2;
  int64_t limit_alphabet = 1000;
  bool cased = false;
};

/// hasten synth reviews: customer reviews made from a seed.
struct SynthCommand {
  int64_t rows = 4000;
  uint64_t seed = 42;
  /// .csv, .tsv or .jsonl; empty prints CSV.
  std::string output{};
};

/// hasten launch: a program as N processes of one world.
struct LaunchCommand {
  int nproc = 1;
  bool oversubscribe = false;
  /// See LaunchOptions.
  bool keep_going = false;
  LogsSpecs logs{};
  /// Program and its arguments. Not empty.
  std::vector<std::string> program{};
};

/// hasten env: versions, cores, threads and back ends.
struct EnvCommand {
  bool json = false;
};

/// A text that answers at once: help or version. Goes to stdout; exit code 0.
struct Answer {
  std::string text{};
};

using Command = std::variant<Answer, TrainCommand, PredictCommand, EvalCommand, PlanCommand,
                             EstimateMemoryCommand, CompareCommand, StateCommand, TokenizerCommand,
                             SynthCommand, LaunchCommand, EnvCommand>;

/// Reads the arguments after the program's name. Flags may be spelled with "_"
/// for "-", as Hugging Face's scripts do. Checks each value by itself and
/// TrainingArguments::validate(); touches no file but that of train's --config, whose
/// keys are the flags' names with "_" (training_args.json of a run is one) and whose
/// values the flags override.
/// Throws InputError "[cli::<command>] --flag=value …": an unknown command or
///   flag (the nearest name is offered), a value of another type or out of
///   range, a required flag that is missing, a flag given twice.
Command parse_command_line(const std::vector<std::string>& arguments);

/// Names --model takes for random weights: those of BertConfig::from_shape,
/// which this layer does not see.
const std::vector<std::string>& model_shapes();
/// "bert-tiny, bert-mini, …".
std::string model_shapes_text();
bool is_model_shape(const std::string& model);

} // namespace hasten
