#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "checks.h"
#include "classifier.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/progress_bar.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/text.h"
#include "hasten/comm/agree.h"
#include "hasten/core/memory.h"
#include "hasten/text/pretrained_folder.h"
#include "hasten/text/synthetic_reviews.h"
#include "parallel/verify.h"
#include "run.h"
#include "train_run.h"

namespace hasten {

namespace detail {

const auto kProgramStart = std::filesystem::file_time_type::clock::now();

/// `config`: of the model to fine-tune. `trained`: it has a head for the task.
TokenizedClassificationOptions tokenize_options(const TrainCommand& command,
                                                const PreTrainedConfig& config, bool trained,
                                                TrainInputs& inputs) {
  TokenizedClassificationOptions options;
  options.texts.eval_split = command.eval_split;
  options.texts.seed = command.arguments.seed;
  options.texts.max_train_rows = command.max_train_rows;
  options.texts.max_eval_rows = command.max_eval_rows;
  options.texts.table = labelled_table(command.table, *inputs.task, inputs.head);
  if (inputs.head == Head::single_label || inputs.head == Head::word_labels) {
    options.texts.label_names = trained ? config.id2label : std::vector<std::string>();
    // Other labels get a new classifier; the loader's report mentions it.
    options.texts.replace_label_names = true;
  }
  if (!is_model_shape(command.model)) {
    options.tokenizer = AutoTokenizer::from_pretrained(command.model);
  } else if (!command.tokenizer.empty()) {
    options.tokenizer = AutoTokenizer::from_pretrained(command.tokenizer);
    inputs.vocabulary = "from " + command.tokenizer;
  } else {
    options.learned.do_lower_case = !command.cased;
    options.learned.model_max_length = config.max_tokens();
    options.vocab.vocab_size = command.vocab_size;
    inputs.vocabulary = "learned from the training texts";
  }
  if (inputs.task->head == ModelTask::causal_lm) {
    inputs.max_length = inputs.options.block_size = block_length(command.block_size, config);
    check_vocabulary(command.model, config, *options.tokenizer);
    set_documents(options.texts.table, command.table, *inputs.task, command.sample_by,
                  TextFiles::open(command.train_file, "cli::train", "--train-file"));
    // Documents are cut into rows later.
    options.max_length = options.texts.table.text_pair_column.empty() ? 0 : inputs.max_length;
  } else {
    inputs.max_length = options.max_length =
        allowed_length(command.arguments.max_length, config,
                       options.tokenizer ? options.tokenizer->model_max_length()
                                         : options.learned.model_max_length);
  }
  options.threads = tokenizer_threads();
  options.cache_dir = cache_folder(command.cache_dir);
  return options;
}

/// Warns, on rank 0, if token ids could not be cached, and, on the rank that made the file again,
/// if the cache file was damaged.
void warn_of_cache(const TokenCacheReport& report, const std::filesystem::path& cache_dir,
                   bool is_main) {
  if (!report.rebuilt.empty()) {
    log_warning("tokenized again: " + report.path.string() + ": " + report.rebuilt);
  }
  if (is_main && (!report.not_kept.empty() || cache_dir.empty())) {
    log_warning("token ids are not cached for later runs: " +
                (cache_dir.empty() ? "neither HOME nor HASTEN_CACHE is set" : report.not_kept) +
                "; set another folder with --cache-dir");
  }
}

TokenizedClassification read_train_data(const TrainCommand& command,
                                        TokenizedClassificationOptions options, bool single_label,
                                        bool is_main) {
  std::optional<ProgressBar> bar; // on rank 0, if reading takes more than a second
  options.progress = [&, waiting = false,
                      start = std::chrono::steady_clock::now()](const auto& progress) mutable {
    if (!is_main || std::chrono::steady_clock::now() - start < std::chrono::seconds(1)) {
      return;
    }
    if (!bar || progress.waiting != waiting) {
      waiting = progress.waiting;
      bar.emplace(waiting ? "wait for another process to tokenise" : "tokenise",
                  std::max<int64_t>(1, progress.total), true);
    }
    bar->update(progress.done);
  };
  constexpr const char* kWhere = "cli::train";
  auto data = tokenize_text_classification(
      command.train_file.empty()
          ? TextFile::of_text("synthetic reviews.csv", synthetic_reviews_table())
          : TextFiles::open(command.train_file, kWhere, "--train-file"),
      command.eval_file.empty() ? TextFiles()
                                : TextFiles::open(command.eval_file, kWhere, "--eval-file"),
      options);
  warn_of_cache(data.cache, options.cache_dir, is_main);
  if (single_label && data.label_names.size() == 1) {
    // A single output means regression to every reader of config.json.
    data.label_names.push_back(data.label_names[0] == "other" ? "other_2" : "other");
  }
  return data;
}

/// A checksum of the token ids, the labels and the labels' names.
std::string train_data_checksum(const TokenizedClassification& data) {
  std::vector<std::string> lines = data.label_names;
  lines.insert(lines.begin(), data.train_checksum);
  return hash_hex(joined(lines, "\n"));
}

// Checkpoints hold weights and two moments, and an incomplete one can exist during a save.
int64_t bytes_on_disk(const TrainingArguments& arguments, const torch::nn::Module& model) {
  // The base of an adapter is not written.
  const int64_t bytes = sum_of(model.parameters(), [](const at::Tensor& parameter) {
    return parameter.requires_grad() ? static_cast<int64_t>(parameter.nbytes()) : 0;
  });
  int64_t saves = 0;
  if (arguments.save_strategy == SaveStrategy::epoch) {
    saves =
        arguments.max_steps > 0 ? 1 : static_cast<int64_t>(std::ceil(arguments.num_train_epochs));
  } else if (arguments.save_strategy != SaveStrategy::no) {
    saves = std::max<int64_t>(1, arguments.save_total_limit);
  }
  if (arguments.save_total_limit > 0) {
    saves = std::min(saves, arguments.save_total_limit);
  }
  const int64_t each = arguments.save_only_model ? 1 : 3; // with two moments
  return bytes * (saves > 0 ? 1 + each * (saves + 1) : 2);
}

PreTrainedModel train_model(const TrainCommand& command, const PreTrainedConfig& config,
                            const TrainInputs& inputs) {
  FromPretrainedOptions options;
  // A regression model from a folder keeps its head; the name of the label column does not matter.
  const bool keeps_head = inputs.head == Head::regression && !is_model_shape(command.model) &&
                          problem_type_of(config) == Head::regression;
  if (!keeps_head && inputs.head != Head::unlabelled) {
    options.id2label = inputs.data->label_names;
  }
  if (inputs.head == Head::regression || inputs.head == Head::multi_label) {
    options.problem_type = spelling(inputs.head);
  }
  options.attn_implementation = command.attn_implementation;
  options.vocab_size = inputs.data->tokenizer.size();
  options.pad_token_id = inputs.data->tokenizer.pad_id();
  options.eos_token_id = inputs.data->tokenizer.special_id("eos_token");
  return model_from_pretrained(command.model, inputs.task->head, options);
}

/// Converts an adapter's base to the dtype of the forward passes, when --precision auto has chosen.
struct CastBase : TrainerCallback {
  explicit CastBase(PreTrainedModel of) : model(std::move(of)) {}
  void on_precision(Precision precision) override {
    if (precision == Precision::bf16 || precision == Precision::fp16) {
      cast_frozen_weights(*model, precision == Precision::bf16 ? at::kBFloat16 : at::kHalf);
    }
  }
  PreTrainedModel model;
};

/// Adapts the model for --lora-r.
std::optional<LoraConfig> adapt_model(const TrainCommand& command, PreTrainedModel& model) {
  std::optional<LoraConfig> config = lora_config(command.lora);
  if (!config) {
    return config;
  }
  std::error_code error;
  config->base_model_name_or_path =
      std::filesystem::is_directory(command.model, error)
          ? std::filesystem::absolute(command.model).lexically_normal().string()
          : command.model;
  for (const std::string& name : model->loading_info().missing_keys) { // the base has no values
    const std::string module = name.substr(0, name.rfind('.'));
    auto& saved = config->modules_to_save;
    if (std::ranges::find(saved, module) == saved.end()) {
      saved.push_back(module);
    }
  }
  config = get_peft_model(model.ptr(), *config);
  CastBase(model).on_precision(command.arguments.effective_precision());
  return config;
}

void add_lora_facts(BannerLines& lines, const TrainCommand& command, const TrainInputs& in,
                    int world_size) {
  const PreTrainedModelImpl& model = *in.model;
  int64_t trained = 0, frozen = 0;
  for (const at::Tensor& parameter : model.parameters()) {
    (parameter.requires_grad() ? trained : frozen) += static_cast<int64_t>(parameter.nbytes());
  }
  const auto [trainable, all] = get_nb_trainable_parameters(model);
  lines.emplace_back(
      "LoRA",
      "rank " + std::to_string(command.lora.r) + ", alpha " + format_digits(command.lora.alpha) +
          ": " + format_count(trainable) + " of " + format_count(all) +
          " parameters are trained (" +
          format_digits(100.0 * static_cast<double>(trainable) / static_cast<double>(all), 3) +
          " %)");
  std::string bytes = format_bytes(trained) + " trained, " + format_bytes(frozen) + " frozen";
  if (world_size > 1) {
    const auto sent = estimate_memory(estimate_command(command, in, world_size)).sent;
    bytes += ", " + format_bytes(sent) + " sent by each rank in " +
             (command.arguments.local_sgd_steps > 0 ? "an average" : "a step");
  }
  lines.emplace_back("LoRA", bytes);
}

void add_model_facts(BannerLines& lines, const TrainCommand& command,
                     const PreTrainedModelImpl& model) {
  const auto commit = hub_commit(command.model);
  lines.emplace_back("model", command.model + (commit.empty() ? "" : ", commit " + commit) + ": " +
                                  std::to_string(model.config().num_hidden_layers) +
                                  " layers, hidden size " +
                                  std::to_string(model.config().hidden_size));
  for (const std::string& line : model.loading_info().report) {
    lines.emplace_back("model", line);
  }
  if (is_model_shape(command.model)) {
    lines.emplace_back("model", "learning rate " + format_digits(command.arguments.learning_rate) +
                                    " (--learning-rate)");
  }
}

void require_class_weights(const TrainCommand& command, int64_t labels) {
  const auto weights = class_weight_numbers(command.arguments.class_weights);
  if (!weights.empty() && std::ssize(weights) != labels) {
    throw InputError("cli::train", "--class-weights=" + command.arguments.class_weights,
                     std::to_string(labels) + " numbers, one per label");
  }
}

void require_row_each(int64_t rows, int world_size) {
  if (rows < world_size) {
    throw InputError("cli::train",
                     "more processes than samples: processes=" + std::to_string(world_size) +
                         ", training samples=" + std::to_string(rows),
                     "at least one sample per process", "lower --nproc");
  }
}

/// Local; writes nothing but the token cache. Throws InputError for any fault of the input.
TrainInputs read_train_inputs(const TrainCommand& command, int world_size, bool is_main) {
  check_inputs(command);
  const bool shape = is_model_shape(command.model);
  const PreTrainedConfig config =
      shape ? AutoConfig::from_shape(command.model) : AutoConfig::from_pretrained(command.model);
  TrainInputs inputs;
  inputs.task = &find_task(command.task);
  // The configuration has two labels even for an encoder without a head. Only its architecture says
  // whether there is a head.
  const bool trained = !shape && config.has_head(inputs.task->head);
  inputs.head =
      spelled<Head>(command.problem_type)
          .value_or(trained ? problem_type(*inputs.task, config) : inputs.task->problem_types[0]);
  if (inputs.head == Head::multi_label && command.table.label_columns.empty() &&
      command.table.label_separator.empty()) {
    throw InputError("cli::train", "--model=" + command.model + " gives a sample several labels",
                     "--label-columns or --label-separator");
  }
  inputs.data = read_train_data(command, tokenize_options(command, config, trained, inputs),
                                inputs.head == Head::single_label, is_main);
  if (inputs.task->collator) { // else a document may give several samples
    require_row_each(std::ssize(inputs.data->train.rows), world_size);
  }
  require_class_weights(command, std::ssize(inputs.data->label_names));
  inputs.model = train_model(command, config, inputs);
  inputs.lora = adapt_model(command, inputs.model);
  check_vocabulary(command.model, inputs.model->config(), inputs.data->tokenizer);
  check_free_space(command.arguments.output_dir, bytes_on_disk(command.arguments, *inputs.model));
  inputs.options.masking.mlm_probability = command.mlm_probability;
  inputs.options.masking.whole_word_mask = command.whole_word_mask;
  inputs.options.masking.seed = command.arguments.seed;
  inputs.options.packing_strategy =
      packing_of(inputs.model, *inputs.task, command.packing_strategy);
  if (is_main && inputs.options.packing_strategy != command.packing_strategy) {
    log_info("a row has one text: the graph of " + command.model +
             " does not keep the texts of a row apart");
  }
  const auto samples = [&](const TokenTable& table) {
    return task_dataset(*inputs.task, table, inputs.data->tokenizer, inputs.options);
  };
  inputs.train = samples(inputs.data->train);
  if (!inputs.data->eval.rows.empty()) {
    inputs.eval = samples(inputs.data->eval);
  }
  require_row_each(inputs.train->size(), world_size);
  return inputs;
}

std::string cache_line(const TokenCacheReport& cache) {
  using Source = TokenCacheReport::Source;
  // A file that is newer than this program comes from a peer, not from an earlier run.
  std::error_code error;
  const bool earlier = std::filesystem::last_write_time(cache.path, error) < kProgramStart;
  return cache.source == Source::memory                      ? "in memory"
         : cache.source == Source::read && earlier && !error ? "read from " + cache.path.string()
                                                             : "kept in " + cache.path.string();
}

EstimateMemoryCommand estimate_command(const TrainCommand& command, const TrainInputs& in,
                                       int world_size) {
  const TrainingArguments& a = command.arguments;
  return {.model = command.model,
          .task = in.task->name,
          .vocab_size = in.model->config().vocab_size,
          .num_labels = in.model->config().num_labels(),
          .strategy = a.local_sgd_steps > 0 ? "local_sgd" : strategy_name(a.strategy),
          .nproc = world_size,
          .lora = command.lora,
          .arguments = a};
}

BannerLines banner_facts(const TrainCommand& command, const TrainInputs& in, int world_size) {
  BannerLines lines;
  if (in.task->problem_types.size() == 1) {
    lines.emplace_back("task", in.task->name);
  } else if (in.head != in.task->problem_types[0]) {
    lines.emplace_back("head", spelling(in.head));
  }
  for (const std::string& line : in.data->report.lines(in.data->label_names, in.head)) {
    lines.emplace_back("data", line);
  }
  const auto rows = static_cast<int64_t>(in.data->train.rows.size() + in.data->eval.rows.size());
  std::string texts =
      std::to_string(in.data->tokens / std::max<int64_t>(1, rows)) + " tokens on average, ";
  if (in.task->collator || in.data->truncated > 0) {
    texts += format_count(in.data->truncated) + " truncated to " + std::to_string(in.max_length);
  } else {
    texts += "in " + format_count(in.train->size()) + " rows of " + std::to_string(in.max_length) +
             " to train on (" + spelling(in.options.packing_strategy) + ")";
  }
  lines.emplace_back("texts", texts);
  lines.emplace_back("token ids", cache_line(in.data->cache));
  if (!in.vocabulary.empty()) {
    lines.emplace_back("vocabulary",
                       format_count(in.data->tokenizer.vocab_size()) + " pieces, " + in.vocabulary);
  }
  add_model_facts(lines, command, *in.model);
  if (in.lora) {
    add_lora_facts(lines, command, in, world_size);
  }
  return lines;
}

/// The model's files, and the command line that made them.
ModelFiles run_files(const TrainCommand& command, const TrainInputs& in) {
  ModelFiles files = classifier_files(in.model, in.data->tokenizer, in.lora);
  files.save = [save = std::move(files.save),
                config = command.run_config](const std::filesystem::path& folder) {
    save(folder);
    // With the flags of data and model, so that --config with this file repeats the run.
    const auto file = folder / "training_args.json";
    nlohmann::json all = parse_json("cli::train", "the flags", config);
    all.update(read_json_file("cli::train", file));
    all.erase("resume_from_checkpoint");
    write_file_atomically(file, all.dump(2) + "\n");
  };
  return files;
}

void warn_of(const TextClassificationReport& report) {
  for (const std::string& warning : report.warnings) {
    log_warning(warning);
  }
}

int dry_run(const TrainCommand& command) {
  const World world = outer_world(command.rendezvous);
  const int ranks = world.world_size > 1 ? world.world_size : command.all_processes();
  if (world.rank > 0) {
    return kExitOk; // only rank 0 prints it
  }
  const TrainInputs in = read_train_inputs(command, ranks, true);
  warn_of(in.data->report);
  print_dry_run(command, in, ranks);
  return kExitOk;
}

/// Returns the best metric as text, or that the run was already finished.
std::string train(const TrainCommand& command, const TrainInputs& in,
                  const std::shared_ptr<Accelerator>& accelerator) {
  TrainingArguments arguments = command.arguments;
  arguments.max_length = in.max_length; // predict and eval truncate to this, too
  Trainer trainer(in.model.ptr(), in.task->loss(in.model, in.head), arguments, in.train, in.eval,
                  in.task->metrics(in.head, in.model->config().id2label), accelerator);
  trainer.set_model_files(run_files(command, in));
  if (in.lora) {
    trainer.add_callback(std::make_shared<CastBase>(in.model));
  }
  if (accelerator->is_main_process()) {
    nlohmann::json altering = {{"train_data", train_data_checksum(*in.data)}};
    if (const auto commit = hub_commit(command.model); !commit.empty()) {
      altering["model_commit"] = commit;
    }
    trainer.set_run_facts(described_inputs(command), altering);
    warn_of(in.data->report);
    if (!arguments.disable_tqdm) {
      const std::string data =
          command.train_file.empty() ? "synthetic reviews" : command.train_file;
      trainer.add_callback(std::make_shared<ProgressCallback>(
          "hasten " HASTEN_VERSION ": " + command.model + " learns " + data,
          [&] { return banner_facts(command, in, accelerator->num_processes()); }));
    }
  }
  const TrainOutput output = trainer.train();
  if (output.already_finished) {
    return finished_line(command) + " ";
  }
  leave_results(trainer, command, in, output);
  const std::optional<double> best = trainer.state().best_metric;
  return !best ? std::string()
               : "Best " + arguments.best_metric_name() + " " +
                     styled(styled(format_fixed(*best, 4), Style::green), Style::bold) + ". ";
}

void agree_on(Communicator& communicator, const char* name, const std::function<void()>& stage) {
  try {
    on_every_rank(communicator, name, [&] {
      stage();
      return nlohmann::json();
    });
  } catch (const std::exception& error) {
    communicator.close();
    if (said_by_peer()) {
      throw SilentExit(interrupt_signal() != 0 ? 128 + interrupt_signal()
                       : dynamic_cast<const InputError*>(&error) != nullptr ? kExitBadInput
                                                                            : kExitFailed);
    }
    throw;
  }
}

void require_equal_data(Communicator& communicator, const std::string& model,
                        const TokenizedClassification& data, const char* where) {
  if (communicator.world_size() == 1) {
    return;
  }
  auto list = nlohmann::json::array();
  list.push_back({"model_commit", hub_commit(model)});
  list.push_back({"labels", joined(data.label_names)});
  std::error_code error;
  for (const char* name : {"config.json", "tokenizer.json", "vocab.txt"}) {
    if (const auto file = std::filesystem::path(model) / name;
        std::filesystem::exists(file, error)) {
      list.push_back({"model's " + std::string(name), "checksum " + hash_hex(read_file(file))});
    }
  }
  const auto add = [&](const char* name, const TokenTable& table, const std::string& checksum) {
    list.push_back({name, format_count(std::ssize(table.rows)) + " (checksum " + checksum + ")"});
  };
  add("samples", data.train, data.train_checksum);
  const auto bytes = std::as_bytes(data.eval.rows); // places, lengths, labels
  add("evaluation samples", data.eval,
      hash_hex({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
  require_equal_lists(communicator, list, where, "data", "the same data on every rank",
                      "give all hosts the same files, and name the commit: NAME@COMMIT");
}

} // namespace detail

int run_command(const TrainCommand& command) {
  using namespace detail;
  install_interrupt_handlers();
  install_memory_meter();
  if (command.dry_run) {
    return dry_run(command);
  }
  AcceleratorOptions options = accelerator_options(command.arguments);
  options.save_frozen_weights = command.lora.r == 0; // a LoRA's base is read again
  const auto accelerator = std::make_shared<Accelerator>(options);
  Communicator& communicator = *accelerator->communicator();
  TrainInputs inputs;
  agree_on(communicator, "cli::read_input", [&] {
    inputs =
        read_train_inputs(command, accelerator->num_processes(), accelerator->is_main_process());
  });
  require_equal_data(communicator, command.model, *inputs.data, "cli::train");
  std::string result;
  try {
    result = train(command, inputs, accelerator);
  } catch (const std::exception& error) {
    communicator.abort(error);
    throw;
  }
  if (accelerator->is_main_process()) {
    const std::string& folder = command.arguments.output_dir;
    log_info(result + "Model in " + folder + ".");
    const bool causal = inputs.task->head == ModelTask::causal_lm;
    log_info(std::string("Try: hasten ") + (causal ? "generate" : "predict") + " --model " +
             folder + " \"" + example_text(*inputs.task, inputs.data->tokenizer) + "\"");
  }
  accelerator->end_training();
  return kExitOk;
}

} // namespace hasten
