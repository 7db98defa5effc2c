// The commands and their flags as structs, and the parser of the command line. Both programs use
// it: `hasten`, which prints help or checks the input and starts `hasten-worker`, and
// `hasten-worker`, which does the work. Flags are declared once, in src/cli/command_line.cpp.
//
// Without LibTorch. Threading: none needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "hasten/config/training_arguments.h"
#include "hasten/hub/download.h"
#include "hasten/launch/launch.h"
#include "hasten/text/packing.h"
#include "hasten/text/problem_type.h"

namespace hasten {

/// How the columns of a CSV or TSV file are read.
struct TableFlags {
  /// Empty: the task's.
  std::string text_column{};
  /// The second text of a pair; empty: samples have one text.
  std::string text_pair_column{};
  /// Empty: the task's.
  std::string label_column{};
  /// Several labels per sample: columns of 0 and 1, "NAME,NAME,…"; or one column whose field has
  /// the labels' names with this separator.
  std::string label_columns{};
  std::string label_separator{};
  /// '\0': tab for .tsv and .tab, otherwise comma.
  char delimiter = '\0';
  bool no_header = false;
  /// "column=value"; all must match.
  std::vector<std::string> filters{};
};

/// The kind of problem that a model's head solves.
using Head = ProblemType;

/// As given; settle_nodes() makes LaunchOptions::rendezvous of them.
struct NodeFlags {
  std::string nnodes = "1";
  std::optional<int> node_rank{};
  std::string master_addr{};
  int master_port = 29500;
  std::string rdzv_conf{};
};

/// The processes that hasten starts on this machine.
struct ProcessFlags : LaunchOptions {
  /// Allows more than 16 processes per core.
  bool oversubscribe = false;
  NodeFlags nodes{};
  /// File with the secret by which ranks on several hosts recognise each other; empty: from
  /// HASTEN_SECRET or HASTEN_SECRET_FILE.
  std::string secret_file{};

  /// Of all hosts, if each has as many as this one.
  int all_processes() const { return nproc * rendezvous.min_nodes; }
};

/// LoRA (hasten/models/lora.h); off with r = 0.
struct LoraFlags {
  int64_t r = 0;
  double alpha = 8;
  double dropout = 0;
  /// Names with commas, or all-linear; empty: by the model's type.
  std::string target_modules{};
  std::string exclude_modules{};
  std::set<int> layers_to_transform{};
  std::string modules_to_save{};
  std::map<std::string, int64_t> rank_pattern{};
  std::map<std::string, double> alpha_pattern{};
  std::string bias = "none";
  bool use_dora = false;
  bool operator==(const LoraFlags&) const = default;
};

/// hasten train: fine-tunes a model for a task.
struct TrainCommand : ProcessFlags {
  /// Asks the hub for no file.
  bool offline = false;
  /// One of task_choices().
  std::string task = "text-classification";
  /// fill-mask: the share of tokens that the model has to find, and whether whole words are masked.
  double mlm_probability = 0.15;
  bool whole_word_mask = false;
  /// text-generation: tokens of a row (0: the model's limit, at most 1024), what shares it, and what
  /// a document of a .txt file is.
  int64_t block_size = 0;
  /// PreTrainedConfig::attn_implementation.
  std::string attn_implementation = "auto";
  PackingStrategy packing_strategy = PackingStrategy::bfd_split;
  SampleBy sample_by = SampleBy::line;
  /// A Hugging Face folder or the name of a repository in its cache (pretrained_folder()), or the
  /// name of a shape (model_shapes()).
  std::string model{};
  /// Such a folder or name with the vocabulary for a shape; empty: learned from the texts.
  std::string tokenizer{};
  /// Maximum size of a learned vocabulary.
  int64_t vocab_size = 30522;
  /// Keep upper case and accents in a learned vocabulary.
  bool cased = false;

  /// Files, patterns (matching_files). Empty: synthetic reviews (hasten/text/synthetic_reviews.h).
  std::string train_file{};
  std::string eval_file{};
  /// Fraction of train_file's samples used for evaluation, [0, 1); 0: no evaluation.
  double eval_split = 0.0;
  TableFlags table{};
  /// Maximum number of samples; 0 uses all.
  int64_t max_train_rows = 0;
  int64_t max_eval_rows = 0;
  /// Folder of cached token ids; empty: see cache_folder().
  std::string cache_dir{};
  /// Whether the results have texts of samples: "on" or "off".
  std::string report_texts = "on";

  /// single_label_classification, regression, multi_label_classification; empty: from the label
  /// columns and the model.
  std::string problem_type{};

  LoraFlags lora{};

  /// True if --nproc was given on the command line.
  bool nproc_given = false;

  /// JSON file with values of flags that the command line does not set; empty: none.
  std::string config{};
  /// All values, as a file that --config reads: part of the run's training_args.json.
  std::string run_config{};
  /// Prints what the run would do, without training.
  bool dry_run = false;

  TrainingArguments arguments{};
};

/// What predict and eval share.
struct ModelFlags {
  /// Asks the hub for no file.
  bool offline = false;
  std::string model{};
  /// One of task_choices(); empty: that of the model's head.
  std::string task{};
  std::string file{}; // files, patterns (matching_files)
  TableFlags table{};
  int64_t max_rows = 0;
  bool json = false;
  int64_t batch_size = 32;
  /// Maximum number of tokens of a text; 0: as in training, or the model's limit.
  int64_t max_length = 0;
};

/// What predict and generate share.
struct TextsFlags : ModelFlags {
  /// As given; a single "-" reads lines from stdin.
  std::vector<std::string> texts{};
  /// .csv or .jsonl; empty prints to stdout.
  std::string output{};
};

/// hasten predict: labels, entities or words for masks of texts.
struct PredictCommand : TextsFlags {
  bool with_logits = false;
  /// fill-mask: tokens for each mask.
  int64_t top_k = 5;
};

/// hasten generate: continues prompts. What is not set is the model's (generation_config.json).
struct GenerateCommand : TextsFlags {
  std::optional<int64_t> max_new_tokens{};
  bool do_sample = false;
  std::optional<double> temperature{};
  std::optional<int64_t> top_k{};
  std::optional<double> top_p{};
  std::optional<double> repetition_penalty{};
  std::vector<std::string> stop_strings{};
  uint64_t seed = 42;
  bool no_cache = false;
};

/// hasten eval: loss, metrics and the scores of each label on a labelled file.
struct EvalCommand : ModelFlags, ProcessFlags {
  /// .csv or .jsonl with the prediction for each sample; empty writes none.
  std::string predictions{};
  /// Of the matrix products; empty: as in training.
  std::optional<Precision> precision{};
};

/// hasten plan: chooses activations to recompute under a memory budget.
struct PlanCommand {
  /// Asks the hub for no file.
  bool offline = false;
  /// A Hugging Face folder, or the name of a shape.
  std::string model{};
  std::string task = "text-classification";
  /// Samples and tokens of one batch of one process.
  int64_t rows = 0;
  int64_t tokens = 0;
  LoraFlags lora{};
  /// Unset: prints only the table of plans.
  GradientCheckpointing budget{};
  /// Files for the plan and for the plot; empty writes none.
  std::string json{};
  std::string svg{};
};

/// hasten estimate-memory: estimates the memory of training, without a run.
struct EstimateMemoryCommand {
  /// Asks the hub for no file.
  bool offline = false;
  /// A Hugging Face folder (only its config.json is read), or a shape.
  std::string model{};
  std::string task = "text-classification";
  /// For a shape.
  int64_t vocab_size = 30522;
  int64_t num_labels = 2;
  /// Samples and tokens of one micro-batch of one process; 0: without activations.
  int64_t rows = 0;
  int64_t tokens = 0;
  /// ddp, zero1, zero2, fsdp, hsdp or local_sgd; no effect with one process.
  std::string strategy = "ddp";
  int nproc = 1;
  bool json = false;
  LoraFlags lora{};
  /// Uses accumulation, precision, optimizer and shard_size.
  TrainingArguments arguments{};
};

/// hasten compare: largest batch and samples per second of strategies in a memory limit.
struct CompareCommand {
  /// Asks the hub for no file.
  bool offline = false;
  /// A Hugging Face folder, or a shape.
  std::string model{};
  /// For a shape.
  int64_t vocab_size = 30522;
  /// Processes on this machine, >= 2.
  int nproc = 2;
  bool oversubscribe = false;
  /// In the order given, without repetitions.
  std::vector<Strategy> strategies{};
  /// Limit of tensor memory per process in bytes; 0: 90 % of the device's free memory, divided by
  /// the processes that share it.
  int64_t memory_limit_bytes = 0;
  /// Largest micro-batch of one process to try, in samples.
  int64_t max_batch_size = 1024;
  /// Number of steps to time.
  int64_t steps = 5;
  /// File for the results; empty writes none.
  std::string json{};
  /// Uses max_length, accumulation, precision, checkpointing and optimizer.
  TrainingArguments arguments{};
};

/// hasten state: inspects a saved state, or merges its shards into one model file.
struct StateCommand {
  /// inspect or consolidate.
  std::string action{};
  /// A checkpoint, or another folder of Accelerator::save_state: of each host that has its own.
  std::vector<std::string> folders{};
  /// consolidate: the safetensors file to write.
  std::string output{};
  /// consolidate: which of the state's models.
  int64_t model = 0;
  bool json = false;
};

/// hasten merge: writes a whole model of an adapter and its base.
struct MergeCommand {
  /// Asks the hub for no file.
  bool offline = false;
  /// The adapter's folder or name.
  std::string model{};
  /// A new or empty folder.
  std::string output_dir{};
};

/// hasten export: writes a model of Python as a graph that hasten trains.
struct ExportCommand {
  /// All of them, which packaging/wheel/hasten/export.py reads again.
  std::vector<std::string> arguments{};
  /// A folder or file to describe instead.
  std::string describe{};
};
/// Replaces this process by Python. Throws InputError if there is none.
[[noreturn]] void export_model(const ExportCommand& command);

/// hasten tokenizer: learns a WordPiece vocabulary, or prints texts as ids.
struct TokenizerCommand {
  /// Asks the hub for no file.
  bool offline = false;
  /// train or encode.
  std::string action{};
  /// Text files (one text per line), or .csv, .tsv and .jsonl with a text column.
  std::vector<std::string> files{};
  /// train: the folder to write the tokenizer to.
  std::string output{};
  /// encode: the tokenizer's folder, and the maximum number of tokens of a text; 0: no limit.
  std::string tokenizer{};
  int64_t max_length = 0;
  std::string text_column = "text";
  int64_t vocab_size = 30522;
  int64_t min_frequency = 2;
  int64_t limit_alphabet = 1000;
  bool cased = false;
};

/// hasten synth reviews: generates customer reviews from a seed.
struct SynthCommand {
  int64_t rows = 4000;
  uint64_t seed = 42;
  /// .csv, .tsv or .jsonl; empty prints CSV.
  std::string output{};
};

/// hasten launch: runs a program, argv, as N processes of one world.
struct LaunchCommand : ProcessFlags {};

/// hasten env: versions, cores, threads and back ends.
struct EnvCommand {
  /// Processes between which communication is measured; 1: none.
  int nproc = 1;
  bool oversubscribe = false;
  bool json = false;
};

/// hasten report: writes an HTML page of one run, or of several side by side.
struct ReportCommand {
  /// Output folders of runs, at least one.
  std::vector<std::string> folders{};
  /// Empty: report.html in the first folder.
  std::filesystem::path output{};
  bool texts = true;
};
/// Runs it, without LibTorch.
void make_report(const ReportCommand& command);

/// Help or version: a text for stdout; exit code 0.
struct Answer {
  std::string text{};
};

/// hasten download: fetches a model of the hub into the cache of huggingface_hub.
struct DownloadCommand {
  /// "org/name", "name", or one of both with "@revision".
  std::string name{};
  DownloadOptions options{};
};

using Command = std::variant<Answer, TrainCommand, PredictCommand, GenerateCommand, EvalCommand,
                             PlanCommand, EstimateMemoryCommand, CompareCommand, StateCommand,
                             MergeCommand, ExportCommand, TokenizerCommand, SynthCommand,
                             LaunchCommand, EnvCommand, ReportCommand, DownloadCommand>;

/// Parses the arguments after the program's name. Flags may be spelled with "_" instead of "-", as
/// in Hugging Face's scripts. Checks each value and calls TrainingArguments::validate(). The only
/// file that it reads is that of train's --config: a JSON object of flags spelled with "_" (such
/// as a run's training_args.json), which flags on the command line override. Variables of the
/// environment (HASTEN_LEARNING_RATE) set flags of train and eval, between the two.
/// Throws InputError "[cli::<command>] --flag=value …" for an unknown command or flag (suggesting
/// the nearest name), a value of another type or out of range, a missing required flag, a flag
/// that is given twice.
Command parse_command_line(const std::vector<std::string>& arguments);

/// Names that --task accepts: those of task_names(), which this layer cannot include.
const std::vector<std::string>& task_choices();

/// Names that --model accepts for random weights: those of AutoConfig::from_shape, which
/// this layer cannot include.
const std::vector<std::string>& model_shapes();
/// "bert-tiny, bert-mini, …".
std::string model_shapes_text();
bool is_model_shape(const std::string& model);

} // namespace hasten
