#include <algorithm>
#include <chrono>
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
#include "hasten/base/progress_bar.h"
#include "hasten/cli/checks.h"
#include "hasten/cli/exit_code.h"
#include "hasten/cli/run.h"
#include "hasten/core/memory.h"
#include "hasten/data/synthetic_reviews.h"
#include "hasten/data/token_cache.h"
#include "head.h"

namespace hasten {

namespace detail {

/// Everything read, checked and tokenised; equal on all ranks.
struct TrainInputs {
  std::optional<TokenizedClassification> data{};
  /// Where the vocabulary is from, for the banner.
  std::string vocabulary{};
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

/// What reading takes long is told on rank 0: nothing below a second.
class TokenizeBar {
 public:
  explicit TokenizeBar(bool enabled) : enabled_(enabled) {}

  void update(const TokenizeProgress& progress) {
    if (!enabled_ ||
        std::chrono::steady_clock::now() - start_ < std::chrono::seconds(1)) {
      return;
    }
    if (!bar_ || progress.waiting != waiting_) {
      waiting_ = progress.waiting;
      bar_.emplace(
          waiting_ ? "wait for another process to tokenise" : "tokenise",
          std::max<int64_t>(1, progress.total),
          true);
    }
    bar_->update(progress.done);
  }

 private:
  bool enabled_;
  bool waiting_ = false;
  std::chrono::steady_clock::time_point start_ =
      std::chrono::steady_clock::now();
  std::optional<ProgressBar> bar_{};
};

TokenizedClassificationOptions tokenize_options(
    const TrainCommand& command, TrainInputs& inputs) {
  TokenizedClassificationOptions options;
  options.texts.eval_split = command.eval_split;
  options.texts.seed = command.arguments.seed;
  options.texts.table = table_options(command.table);
  options.texts.max_train_rows = command.max_train_rows;
  options.texts.max_eval_rows = command.max_eval_rows;
  options.texts.label_names = label_names_of_model(command.model);
  // By a new classifier; the loader's report says so.
  options.texts.replace_label_names = true;
  BertConfig config;
  if (!is_model_shape(command.model)) {
    options.tokenizer = WordPieceTokenizer::load(command.model);
    config = read_bert_config(command.model);
  } else {
    config = BertConfig::from_shape(command.model);
    if (!command.tokenizer.empty()) {
      options.tokenizer = WordPieceTokenizer::load(command.tokenizer);
      inputs.vocabulary = "from " + command.tokenizer;
    } else {
      options.learned.do_lower_case = !command.cased;
      options.learned.model_max_length = config.max_position_embeddings;
      options.vocab.vocab_size = command.vocab_size;
      inputs.vocabulary = "learned from the training texts";
    }
  }
  inputs.max_length = options.max_length = allowed_length(
      command.arguments.max_length,
      config,
      options.tokenizer ? options.tokenizer->options() : options.learned);
  options.threads = tokenizer_threads();
  options.cache_dir = cache_folder(command.cache_dir);
  return options;
}

/// Where ids were to be kept and are not, once; where a file was damaged, by
/// whoever made it again.
void tell_of_cache(
    const TokenCacheReport& report,
    const std::filesystem::path& cache_dir,
    bool is_main) {
  if (!report.rebuilt.empty()) {
    log_warning(
        "token ids were made again: " + report.path.string() + ": " +
        report.rebuilt);
  }
  if (is_main && (!report.not_kept.empty() || cache_dir.empty())) {
    log_warning(
        "token ids are not kept for later runs: " +
        (cache_dir.empty() ? "neither HOME nor HASTEN_CACHE is set"
                           : report.not_kept) +
        "; --cache-dir names another folder");
  }
}

TokenizedClassification read_train_data(
    const TrainCommand& command, TrainInputs& inputs, bool is_main) {
  auto options = tokenize_options(command, inputs);
  TokenizeBar bar(is_main);
  options.progress = [&bar](const TokenizeProgress& progress) {
    bar.update(progress);
  };
  constexpr const char* kWhere = "cli::train";
  auto data = tokenize_text_classification(
      command.train_file.empty()
          ? TextFile::of_text(
                "synthetic reviews.csv", synthetic_reviews_table())
          : TextFile::open(command.train_file, kWhere),
      command.eval_file.empty() ? nullptr
                                : TextFile::open(command.eval_file, kWhere),
      options);
  tell_of_cache(data.cache, options.cache_dir, is_main);
  if (data.label_names.size() == 1) {
    // One number out means regression to every reader of config.json.
    data.label_names.push_back(
        data.label_names[0] == "other" ? "other_2" : "other");
  }
  return data;
}

/// Of texts as the model sees them, their labels and what these are called.
std::string train_data_checksum(const TokenizedClassification& data) {
  std::string text = data.train_checksum;
  for (const std::string& name : data.label_names) {
    text += "\n" + name;
  }
  return hash_hex(text);
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
TrainInputs read_train_inputs(
    const TrainCommand& command, int world_size, bool is_main) {
  check_train_inputs(command);
  TrainInputs inputs;
  inputs.data = read_train_data(command, inputs, is_main);
  const auto rows = static_cast<int64_t>(inputs.data->train.rows.size());
  if (rows < world_size) {
    throw InputError(
        "cli::train",
        "more processes than rows: processes=" + std::to_string(world_size) +
            ", training rows=" + std::to_string(rows),
        "at least one row a process",
        "lower --nproc");
  }
  const WordPieceTokenizer& tokenizer = inputs.data->tokenizer;
  LoadBertOptions options;
  const auto weights = class_weight_numbers(command.arguments.class_weights);
  if (!weights.empty() && weights.size() != inputs.data->label_names.size()) {
    throw InputError(
        "cli::train",
        "--class-weights=" + command.arguments.class_weights,
        std::to_string(inputs.data->label_names.size()) +
            " numbers, one a label");
  }
  options.id2label = inputs.data->label_names;
  options.vocab_size = tokenizer.vocab_size();
  options.pad_token_id = tokenizer.pad_id();
  inputs.bert = load_bert_classifier(command.model, options);
  check_vocabulary(command.model, inputs.bert.config, tokenizer);
  check_free_space(
      command.arguments.output_dir,
      bytes_on_disk(command.arguments, *inputs.bert.model));
  return inputs;
}

std::string cache_line(const TokenCacheReport& cache) {
  using Source = TokenCacheReport::Source;
  return cache.source == Source::memory
             ? "in memory"
             : (cache.source == Source::read ? "read from " : "kept in ") +
                   cache.path.string();
}

BannerLines banner_facts(const TrainCommand& command, const TrainInputs& in) {
  BannerLines lines;
  for (const std::string& line : in.data->report.lines(in.data->label_names)) {
    lines.emplace_back("data", line);
  }
  const auto rows = static_cast<int64_t>(
      in.data->train.rows.size() + in.data->eval.rows.size());
  lines.emplace_back(
      "texts",
      std::to_string(in.data->tokens / std::max<int64_t>(1, rows)) +
          " tokens on average, " + format_count(in.data->truncated) +
          " cut to " + std::to_string(in.max_length));
  lines.emplace_back("token ids", cache_line(in.data->cache));
  if (!in.vocabulary.empty()) {
    lines.emplace_back(
        "vocabulary",
        format_count(in.data->tokenizer.vocab_size()) + " pieces, " +
            in.vocabulary);
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
  const TrainInputs inputs = read_train_inputs(command, ranks, true);
  const auto train = std::make_shared<const TokenizedDataset>(
      inputs.data->train,
      PaddingOptions{.pad_id = inputs.data->tokenizer.pad_id()});
  int64_t longest = 0;
  for (int64_t row = 0; row < train->size(); ++row) {
    longest = std::max(longest, train->length(row));
  }
  print_dry_run(
      command,
      {.world_size = ranks,
       .facts = banner_facts(command, inputs),
       .train = train,
       .eval_rows = std::ssize(inputs.data->eval.rows),
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
  const WordPieceTokenizer& tokenizer = inputs.data->tokenizer;
  BertForSequenceClassification model = inputs.bert.model;
  const auto dataset_of = [&](const TokenTable& rows) {
    return std::make_shared<const TokenizedDataset>(
        rows, PaddingOptions{.pad_id = tokenizer.pad_id()});
  };
  const auto train = dataset_of(inputs.data->train);
  std::shared_ptr<const TokenizedDataset> eval;
  if (!inputs.data->eval.rows.empty()) {
    eval = dataset_of(inputs.data->eval);
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
        {{"train_data", train_data_checksum(*inputs.data)}});
    for (const std::string& warning : inputs.data->report.warnings) {
      log_warning(warning);
    }
    trainer.add_callback(std::make_shared<TrainConsole>(
        "hasten " HASTEN_VERSION ": " + command.model + " learns " +
            (command.train_file.empty() ? "synthetic reviews"
                                        : command.train_file),
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
    inputs = detail::read_train_inputs(
        command, accelerator->num_processes(), accelerator->is_main_process());
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
