// hasten train where labels are numbers: regressions, and several labels a row.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "agreement.h"
#include "console.h"
#include "dry_run.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/progress_bar.h"
#include "hasten/cli/checks.h"
#include "hasten/cli/exit_code.h"
#include "hasten/trainer/losses.h"
#include "head.h"

namespace hasten::detail {

/// Everything read, checked and tokenised; equal on all ranks.
struct TargetInputs {
  Head head = Head::regression;
  TextTargets data{};
  std::optional<WordPieceTokenizer> tokenizer{};
  TokenizedTexts train_texts{};
  TokenizedTexts eval_texts{};
  std::shared_ptr<const Dataset> train{};
  std::shared_ptr<const Dataset> eval{}; // null without rows
  int64_t max_length = 0;
  LoadedBert bert{};
};

WordPieceTokenizer target_tokenizer(
    const TrainCommand& command, const std::vector<std::string>& texts) {
  if (!is_model_shape(command.model) || !command.tokenizer.empty()) {
    return WordPieceTokenizer::load(
        command.tokenizer.empty() ? command.model : command.tokenizer);
  }
  WordPieceOptions options;
  options.do_lower_case = !command.cased;
  options.model_max_length = BertConfig{}.max_position_embeddings;
  return WordPieceTokenizer(
      build_wordpiece_vocab(texts, options, {.vocab_size = command.vocab_size}),
      options);
}

/// A folder's regression keeps its head, whatever the column is called.
LoadedBert target_model(const TrainCommand& command, const TargetInputs& in) {
  LoadBertOptions options;
  const bool keeps_head =
      in.head == Head::regression && !is_model_shape(command.model) &&
      head_of(read_bert_config(command.model)) == Head::regression;
  if (!keeps_head) {
    options.id2label = in.data.label_names;
  }
  options.problem_type = problem_type_of(in.head);
  options.vocab_size = in.tokenizer->vocab_size();
  options.pad_token_id = in.tokenizer->pad_id();
  return load_bert_classifier(command.model, options);
}

std::shared_ptr<const Dataset> target_dataset(
    const TargetInputs& in,
    const TokenizedTexts& texts,
    const TargetTexts& rows) {
  return rows.size() == 0 ? nullptr
                          : std::make_shared<const TargetDataset>(
                                make_dataset(texts, {}, *in.tokenizer),
                                rows.targets,
                                in.data.targets_per_row(),
                                in.head == Head::regression);
}

/// Local; touches nothing. Throws InputError for anything wrong with the input.
TargetInputs read_target_inputs(
    const TrainCommand& command, Head head, int world_size) {
  check_train_inputs(command);
  TargetInputs in;
  in.head = head;
  TextTargetsOptions options = target_options(command.table, head, {});
  if (head == Head::multi_label && options.label_columns.empty() &&
      options.label_separator.empty()) {
    throw InputError(
        "cli::train",
        "--model=" + command.model + " gives a row several labels",
        "--label-columns or --label-separator");
  }
  options.train_file = command.train_file;
  options.eval_file = command.eval_file;
  options.eval_split = command.eval_split;
  options.seed = command.arguments.seed;
  options.max_train_rows = command.max_train_rows;
  options.max_eval_rows = command.max_eval_rows;
  in.data = load_text_targets(options);
  if (in.data.train.size() < world_size) {
    throw InputError(
        "cli::train",
        "more processes than rows: processes=" + std::to_string(world_size) +
            ", training rows=" + std::to_string(in.data.train.size()),
        "at least one row a process",
        "lower --nproc");
  }
  const auto weights = class_weight_numbers(command.arguments.class_weights);
  if (!weights.empty() &&
      static_cast<int64_t>(weights.size()) != in.data.targets_per_row()) {
    throw InputError(
        "cli::train",
        "--class-weights=" + command.arguments.class_weights,
        std::to_string(in.data.targets_per_row()) + " numbers, one a label");
  }
  in.tokenizer = target_tokenizer(command, in.data.train.texts);
  in.bert = target_model(command, in);
  check_vocabulary(command.model, in.bert.config, *in.tokenizer);
  in.max_length = allowed_length(
      command.arguments.max_length, in.bert.config, in.tokenizer->options());
  check_free_space(
      command.arguments.output_dir,
      bytes_on_disk(command.arguments, *in.bert.model));
  const int threads = tokenizer_threads();
  in.train_texts = tokenize_texts(
      *in.tokenizer, in.data.train.texts, in.max_length, threads);
  in.eval_texts =
      tokenize_texts(*in.tokenizer, in.data.eval.texts, in.max_length, threads);
  in.train = target_dataset(in, in.train_texts, in.data.train);
  in.eval = target_dataset(in, in.eval_texts, in.data.eval);
  return in;
}

BannerLines target_facts(const TrainCommand& command, const TargetInputs& in) {
  BannerLines lines;
  lines.emplace_back("head", problem_type_of(in.head));
  for (const std::string& line : in.data.lines()) {
    lines.emplace_back("data", line);
  }
  const BertConfig& config = in.bert.config;
  lines.emplace_back(
      "model",
      command.model + ": " + std::to_string(config.num_hidden_layers) +
          " layers, " + std::to_string(config.hidden_size) + " wide");
  for (const std::string& line : in.bert.report) {
    lines.emplace_back("model", line);
  }
  return lines;
}

std::string target_checksum(const TargetInputs& in) {
  std::string rows;
  for (const auto& ids : in.train_texts.ids) {
    rows += hash_hex(
        {reinterpret_cast<const char*>(ids.data()),
         ids.size() * sizeof(ids[0])});
  }
  const auto& targets = in.data.train.targets;
  rows += hash_hex(
      {reinterpret_cast<const char*>(targets.data()),
       targets.size() * sizeof(targets[0])});
  for (const std::string& name : in.data.label_names) {
    rows += "\n" + name;
  }
  return hash_hex(rows);
}

int dry_run_targets(const TrainCommand& command, Head head) {
  const World world = world_from_environment();
  const int ranks = world.world_size > 1 ? world.world_size : command.nproc;
  if (world.rank > 0) {
    return kExitOk; // rank 0 says it
  }
  const TargetInputs in = read_target_inputs(command, head, ranks);
  int64_t longest = 0;
  for (const auto& ids : in.train_texts.ids) {
    longest = std::max(longest, static_cast<int64_t>(ids.size()));
  }
  print_dry_run(
      command,
      {.world_size = ranks,
       .facts = target_facts(command, in),
       .train = in.train,
       .eval_rows = in.data.eval.size(),
       .model = in.bert.model,
       .longest = longest,
       .disk_bytes = bytes_on_disk(command.arguments, *in.bert.model)});
  return kExitOk;
}

/// False where the run was finished before.
bool train_on_targets(
    const TrainCommand& command,
    TargetInputs& in,
    const std::shared_ptr<Accelerator>& accelerator) {
  TrainingArguments arguments = command.arguments;
  arguments.max_length = in.max_length; // what predict and eval cut to
  Trainer trainer(
      in.bert.model.ptr(),
      head_loss(in.bert.model, in.head),
      arguments,
      in.train,
      in.eval,
      head_metrics(in.head, in.bert.config.num_labels()),
      accelerator);
  trainer.set_model_files(classifier_files(in.bert.model, *in.tokenizer));
  if (accelerator->is_main_process()) {
    trainer.set_run_facts(
        described_inputs(command), {{"train_data", target_checksum(in)}});
    trainer.add_callback(std::make_shared<TrainConsole>(
        "hasten " HASTEN_VERSION ": " + command.model + " learns " +
            command.train_file,
        target_facts(command, in)));
  }
  return !trainer.train().already_finished;
}

int run_train_targets(const TrainCommand& command, Head head) {
  if (command.dry_run) {
    return dry_run_targets(command, head);
  }
  const auto accelerator = std::make_shared<Accelerator>(AcceleratorOptions{
      .gradient_accumulation_steps =
          command.arguments.gradient_accumulation_steps,
      .seed = command.arguments.seed,
      .strategy = command.arguments.strategy,
      .shard_size = static_cast<int>(command.arguments.shard_size)});
  Communicator& communicator = *accelerator->communicator();
  TargetInputs in;
  agree_on(communicator, "cli: read the input", [&] {
    in = read_target_inputs(command, head, accelerator->num_processes());
  });
  bool trained = false;
  try {
    trained = train_on_targets(command, in, accelerator);
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    communicator.abandon(what.substr(0, what.find('\n'))); // no stack trace
    throw;
  }
  if (accelerator->is_main_process()) {
    log_info(
        (trained ? std::string() : finished_line(command) + " ") + "Model in " +
        command.arguments.output_dir + ".");
  }
  accelerator->finish();
  return kExitOk;
}

} // namespace hasten::detail
