#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "agreement.h"
#include "classifier.h"
#include "console.h"
#include "dry_run.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/cli/checks.h"
#include "hasten/cli/exit_code.h"
#include "hasten/cli/run.h"
#include "hasten/core/memory.h"
#include "head.h"

namespace hasten {

namespace detail {

/// Everything read, checked and tokenised; equal on all ranks.
struct TrainInputs {
  TextClassificationData data{};
  std::optional<WordPieceTokenizer> tokenizer{};
  /// Where the vocabulary is from, for the banner.
  std::string vocabulary{};
  TokenizedTexts train{};
  TokenizedTexts eval{};
  int64_t max_length = 0;
  LoadedBert bert{};
};

/// Label names of a folder that is a classifier; none otherwise.
std::vector<std::string> label_names_of_model(const std::string& model) {
  if (is_model_shape(model)) {
    return {};
  }
  // The configuration names two labels even for a bare encoder; whether there
  // is a classifier is said by its architecture.
  BertConfig config = read_bert_config(model);
  const auto& classes = config.architectures;
  return std::find(
             classes.begin(), classes.end(), "BertForSequenceClassification") ==
                 classes.end()
             ? std::vector<std::string>()
             : std::move(config.id2label);
}

TextClassificationData read_train_data(const TrainCommand& command) {
  TextClassificationOptions options;
  options.train_file = command.train_file;
  options.eval_file = command.eval_file;
  options.eval_split = command.eval_split;
  options.seed = command.arguments.seed;
  options.table = table_options(command.table);
  options.max_train_rows = command.max_train_rows;
  options.max_eval_rows = command.max_eval_rows;
  options.label_names = label_names_of_model(command.model);
  // By a new classifier; the loader's report says so.
  options.replace_label_names = true;
  TextClassificationData data = load_text_classification(options);
  if (data.label_names.size() == 1) {
    // One number out means regression to every reader of config.json.
    data.label_names.push_back(
        data.label_names[0] == "other" ? "other_2" : "other");
  }
  return data;
}

void read_tokenizer(const TrainCommand& command, TrainInputs& inputs) {
  if (!is_model_shape(command.model)) {
    inputs.tokenizer = WordPieceTokenizer::load(command.model);
    return;
  }
  if (!command.tokenizer.empty()) {
    inputs.tokenizer = WordPieceTokenizer::load(command.tokenizer);
    inputs.vocabulary = "from " + command.tokenizer;
    return;
  }
  WordPieceOptions options;
  options.do_lower_case = !command.cased;
  options.model_max_length = BertConfig{}.max_position_embeddings;
  inputs.tokenizer.emplace(
      build_wordpiece_vocab(
          inputs.data.train.texts, options, {.vocab_size = command.vocab_size}),
      options);
  inputs.vocabulary = "learned from the training texts";
}

/// Of texts as the model sees them, their labels and what these are called.
std::string train_data_checksum(const TrainInputs& inputs) {
  std::string rows;
  for (const auto& ids : inputs.train.ids) {
    rows += hash_hex(
        {reinterpret_cast<const char*>(ids.data()),
         ids.size() * sizeof(ids[0])});
  }
  for (const int64_t label : inputs.data.train.labels) {
    rows += "," + std::to_string(label);
  }
  for (const std::string& name : inputs.data.label_names) {
    rows += "\n" + name;
  }
  return hash_hex(rows);
}

// Checkpoints hold two moments beside the weights, and one is in the making.
int64_t bytes_on_disk(
    const TrainingArguments& arguments, const torch::nn::Module& model) {
  int64_t bytes = 0;
  for (const auto& parameter : model.parameters()) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  int64_t saves = 0;
  if (arguments.save_strategy == IntervalStrategy::epoch) {
    saves = arguments.max_steps > 0
                ? 1
                : static_cast<int64_t>(std::ceil(arguments.num_train_epochs));
  } else if (arguments.save_strategy == IntervalStrategy::steps) {
    saves = std::max<int64_t>(1, arguments.save_total_limit);
  }
  if (arguments.save_total_limit > 0) {
    saves = std::min(saves, arguments.save_total_limit);
  }
  const int64_t each = arguments.save_only_model ? 1 : 3; // with two moments
  return bytes * (saves > 0 ? 1 + each * (saves + 1) : 2);
}

/// Local; touches nothing. Throws InputError for anything wrong with the input.
TrainInputs read_train_inputs(const TrainCommand& command, int world_size) {
  check_train_inputs(command);
  TrainInputs inputs;
  inputs.data = read_train_data(command);
  const int64_t rows = inputs.data.train.size();
  if (rows < world_size) {
    throw InputError(
        "cli::train",
        "more processes than rows: processes=" + std::to_string(world_size) +
            ", training rows=" + std::to_string(rows),
        "at least one row a process",
        "lower --nproc");
  }
  read_tokenizer(command, inputs);
  const WordPieceTokenizer& tokenizer = *inputs.tokenizer;
  LoadBertOptions options;
  options.id2label = inputs.data.label_names;
  const auto weights = class_weight_numbers(command.arguments.class_weights);
  if (!weights.empty() && weights.size() != inputs.data.label_names.size()) {
    throw InputError(
        "cli::train",
        "--class-weights=" + command.arguments.class_weights,
        std::to_string(inputs.data.label_names.size()) +
            " numbers, one a label");
  }
  options.vocab_size = tokenizer.vocab_size();
  options.pad_token_id = tokenizer.pad_id();
  inputs.bert = load_bert_classifier(command.model, options);
  check_vocabulary(command.model, inputs.bert.config, tokenizer);
  inputs.max_length = allowed_length(
      command.arguments.max_length, inputs.bert.config, tokenizer);
  check_free_space(
      command.arguments.output_dir,
      bytes_on_disk(command.arguments, *inputs.bert.model));
  const int threads = tokenizer_threads();
  inputs.train = tokenize_texts(
      tokenizer, inputs.data.train.texts, inputs.max_length, threads);
  inputs.eval = tokenize_texts(
      tokenizer, inputs.data.eval.texts, inputs.max_length, threads);
  return inputs;
}

BannerLines banner_facts(const TrainCommand& command, const TrainInputs& in) {
  BannerLines lines;
  for (const std::string& line : in.data.report.lines(in.data.label_names)) {
    lines.emplace_back("data", line);
  }
  const int64_t rows = in.data.train.size() + in.data.eval.size();
  const int64_t tokens = in.train.tokens + in.eval.tokens;
  const int64_t cut = in.train.truncated + in.eval.truncated;
  lines.emplace_back(
      "texts",
      std::to_string(tokens / std::max<int64_t>(1, rows)) +
          " tokens on average, " + format_count(cut) + " cut to " +
          std::to_string(in.max_length));
  if (!in.vocabulary.empty()) {
    lines.emplace_back(
        "vocabulary",
        format_count(in.tokenizer->vocab_size()) + " pieces, " + in.vocabulary);
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

int dry_run_train(const TrainCommand& command) {
  const World world = world_from_environment();
  const int ranks = world.world_size > 1 ? world.world_size : command.nproc;
  if (world.rank > 0) {
    return kExitOk; // rank 0 says it
  }
  TrainInputs inputs = read_train_inputs(command, ranks);
  const auto train = make_dataset(inputs.train, {}, *inputs.tokenizer);
  int64_t longest = 0;
  for (const auto& ids : inputs.train.ids) {
    longest = std::max(longest, static_cast<int64_t>(ids.size()));
  }
  print_dry_run(
      command,
      {.world_size = ranks,
       .facts = banner_facts(command, inputs),
       .train = train,
       .eval_rows = inputs.data.eval.size(),
       .model = inputs.bert.model,
       .longest = longest,
       .disk_bytes = bytes_on_disk(command.arguments, *inputs.bert.model)});
  return kExitOk;
}

/// False where the run was finished before.
bool train_classifier(
    const TrainCommand& command,
    TrainInputs& inputs,
    const std::shared_ptr<Accelerator>& accelerator) {
  TrainingArguments arguments = command.arguments;
  arguments.max_length = inputs.max_length; // what predict and eval cut to
  const WordPieceTokenizer& tokenizer = *inputs.tokenizer;
  BertForSequenceClassification model = inputs.bert.model;
  auto train = make_dataset(inputs.train, inputs.data.train.labels, tokenizer);
  std::shared_ptr<const TokenizedDataset> eval;
  if (inputs.data.eval.size() > 0) {
    eval = make_dataset(inputs.eval, inputs.data.eval.labels, tokenizer);
  }
  Trainer trainer(
      model.ptr(),
      classification_loss(model),
      arguments,
      train,
      eval,
      classification_metrics(inputs.bert.config.num_labels()),
      accelerator);
  trainer.set_model_files(classifier_files(model, tokenizer));
  if (accelerator->is_main_process()) {
    trainer.set_run_facts(
        described_inputs(command),
        {{"train_data", train_data_checksum(inputs)}});
    for (const std::string& warning : inputs.data.report.warnings) {
      log_warning(warning);
    }
    trainer.add_callback(std::make_shared<TrainConsole>(
        "hasten " HASTEN_VERSION ": " + command.model + " learns " +
            command.train_file,
        banner_facts(command, inputs)));
  }
  return !trainer.train().already_finished;
}

} // namespace detail

int run_train(const TrainCommand& command) {
  install_interrupt_handlers();
  install_memory_meter();
  if (const auto head = detail::head_of(command);
      head != detail::Head::single_label) {
    return detail::run_train_targets(command, head);
  }
  if (command.dry_run) {
    return detail::dry_run_train(command);
  }
  const auto accelerator = std::make_shared<Accelerator>(AcceleratorOptions{
      .gradient_accumulation_steps =
          command.arguments.gradient_accumulation_steps,
      .seed = command.arguments.seed,
      .strategy = command.arguments.strategy,
      .shard_size = static_cast<int>(command.arguments.shard_size)});
  Communicator& communicator = *accelerator->communicator();
  detail::TrainInputs inputs;
  detail::agree_on(communicator, "cli: read the input", [&] {
    inputs = detail::read_train_inputs(command, accelerator->num_processes());
  });
  bool trained = false;
  try {
    trained = detail::train_classifier(command, inputs, accelerator);
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    communicator.abandon(what.substr(0, what.find('\n'))); // no stack trace
    throw;
  }
  if (accelerator->is_main_process()) {
    log_info(
        (trained ? std::string() : finished_line(command) + " ") + "Model in " +
        command.arguments.output_dir + ". Try: hasten predict --model " +
        command.arguments.output_dir + " \"some text\"");
  }
  accelerator->finish();
  return kExitOk;
}

} // namespace hasten
