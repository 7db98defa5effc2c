#include "classifier.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/text/pretrained_folder.h"
#include "hasten/trainer/losses.h"
#include "hasten/trainer/output_folder.h"

namespace hasten::detail {

/// A file of the run that made the model's folder; an empty object if there is none.
nlohmann::json trained_json(const std::filesystem::path& file) {
  std::error_code error;
  return std::filesystem::exists(file, error) ? read_json_file("cli::model", file)
                                              : nlohmann::json::object();
}

/// The class weights of that run, from hasten_state.json, which has values for "balanced", too;
/// 1 for labels that training did not have.
std::string trained_class_weights(const std::filesystem::path& folder, int64_t labels) {
  const nlohmann::json json = trained_json(folder / kRunFile);
  std::vector<std::string> weights;
  if (json.is_object()) {
    for (const auto& weight : json.value("class_weights", nlohmann::json::array())) {
      weights.push_back(weight.dump());
    }
  }
  if (!weights.empty()) {
    weights.resize(std::max(weights.size(), static_cast<size_t>(labels)), "1");
  }
  return joined(weights, ",");
}

int64_t allowed_length(int64_t asked, const PreTrainedConfig& config, int64_t model_max_length) {
  int64_t length = config.max_tokens();
  if (model_max_length > 0) {
    length = std::min(length, model_max_length);
  }
  return asked > 0 ? std::min(asked, length) : length;
}

int64_t block_length(int64_t asked, const PreTrainedConfig& config) {
  if (asked > config.max_tokens()) {
    throw InputError("cli::model", "--block-size=" + std::to_string(asked),
                     "at most the model's positions: " + std::to_string(config.max_tokens()));
  }
  return asked > 0 ? asked : std::min<int64_t>(1024, config.max_tokens());
}

void check_vocabulary(const std::string& folder, const PreTrainedConfig& config,
                      const Tokenizer& tokenizer) {
  if (tokenizer.size() > config.vocab_size) {
    throw InputError(
        "cli::model",
        folder + ": the vocabulary has " + std::to_string(tokenizer.size()) +
            " pieces, but config.json has vocab_size=" + std::to_string(config.vocab_size),
        "a vocabulary no larger than the model's",
        "take vocab.txt and config.json from the same model");
  }
}

Tokenizer tokenizer_of(const std::string& name) {
  const std::filesystem::path folder = pretrained_folder(name);
  std::error_code ignored;
  const bool has_none = !std::filesystem::exists(folder / "tokenizer_config.json", ignored);
  return AutoTokenizer::from_pretrained(
      has_none && LoraConfig::is_adapter(folder) ? LoraConfig::base_of(folder) : name);
}

TextModel load_text_model(const ModelFlags& flags) {
  const std::string& name = flags.model;
  const Task& task =
      flags.task.empty() ? task_of(AutoConfig::from_pretrained(name)) : find_task(flags.task);
  Tokenizer tokenizer = tokenizer_of(name);
  PreTrainedModel model = model_from_pretrained(name, task.head);
  check_vocabulary(name, model->config(), tokenizer);
  if (model->loading_info().new_output) {
    throw InputError("cli::model", name + " has no trained head for " + task.name,
                     "a model that was fine-tuned for it",
                     "fine-tune it first: hasten train --task " + task.name + " --model " + name);
  }
  model->eval();
  const std::filesystem::path folder = pretrained_folder(name);
  const auto file = folder / "training_args.json";
  const nlohmann::json arguments = trained_json(file);
  if (!arguments.is_object()) {
    throw InputError("cli::model", file.string() + " is not a JSON object",
                     "a training_args.json as hasten train writes it");
  }
  const nlohmann::json trained_length = arguments.value("max_length", nlohmann::json());
  const int64_t asked = flags.max_length > 0 || !trained_length.is_number_integer()
                            ? flags.max_length
                            : trained_length.get<int64_t>();
  TaskDataOptions data;
  auto& masking = data.masking;
  masking.mlm_probability = arguments.value("mlm_probability", masking.mlm_probability);
  masking.whole_word_mask = arguments.value("whole_word_mask", false);
  masking.seed = arguments.value("seed", masking.seed);
  const bool causal = task.head == ModelTask::causal_lm;
  const int64_t length = causal
                             ? block_length(asked, model->config())
                             : allowed_length(asked, model->config(), tokenizer.model_max_length());
  data.block_size = length;
  const auto named = [&](const char* key, auto& value) {
    const nlohmann::json spelled_value = arguments.value(key, nlohmann::json());
    if (spelled_value.is_string()) {
      value =
          spelled<std::decay_t<decltype(value)>>(spelled_value.get<std::string>()).value_or(value);
    }
  };
  Precision precision = Precision::no;
  SampleBy sample_by = SampleBy::line;
  named("precision", precision);
  named("sample_by", sample_by);
  named("packing_strategy", data.packing_strategy);
  data.packing_strategy = packing_of(model, task, data.packing_strategy);
  const int64_t labels = model->config().num_labels();
  return {&task,
          std::move(model),
          std::move(tokenizer),
          length,
          precision,
          arguments.value("label_smoothing_factor", 0.0),
          trained_class_weights(folder, labels),
          data,
          sample_by};
}

PackingStrategy packing_of(PreTrainedModel model, const Task& task, PackingStrategy wanted) {
  const bool apart = task.head != ModelTask::causal_lm || wanted != PackingStrategy::bfd_split ||
                     model->supports_packing();
  return apart ? wanted : PackingStrategy::none;
}

ProblemType problem_type(const Task& task, const PreTrainedConfig& config) {
  return task.problem_types.size() > 1 ? problem_type_of(config) : task.problem_types[0];
}

std::string example_text(const Task& task, const Tokenizer& tokenizer) {
  return task.head == ModelTask::causal_lm ? "Once upon a time"
         : task.head == ModelTask::masked_lm
             ? "some " + tokenizer.token(tokenizer.special_id("mask_token")) + " text"
             : "some text";
}

Batch made_up_batch(const PreTrainedModelImpl& model, int64_t rows, int64_t tokens) {
  const PreTrainedConfig& config = model.config();
  Batch batch;
  batch.indices.resize(static_cast<size_t>(rows));
  std::iota(batch.indices.begin(), batch.indices.end(), 0);
  batch.tensors["input_ids"] = at::randint(1, config.vocab_size, {rows, tokens}, at::kLong);
  batch.tensors["attention_mask"] = at::ones({rows, tokens}, at::kLong);
  batch.tensors["attention_mask"][rows - 1][tokens - 1].zero_();
  batch.tensors["labels"] =
      model.task() == ModelTask::sequence_classification
          ? at::randint(config.num_labels(), {rows}, at::kLong)
          : at::randint(model.task() == ModelTask::token_classification ? config.num_labels()
                                                                        : config.vocab_size,
                        {rows, tokens}, at::kLong);
  return batch;
}

std::optional<LoraConfig> lora_config(const LoraFlags& flags) {
  if (flags.r == 0) {
    return std::nullopt;
  }
  const auto names = [](const std::string& text) {
    return text.empty() ? std::vector<std::string>() : split(text);
  };
  return LoraConfig{
      .r = flags.r,
      .lora_alpha = flags.alpha,
      .lora_dropout = flags.dropout,
      .target_modules = names(flags.target_modules),
      .exclude_modules = names(flags.exclude_modules),
      .layers_to_transform = {flags.layers_to_transform.begin(), flags.layers_to_transform.end()},
      .modules_to_save = names(flags.modules_to_save),
      .rank_pattern = flags.rank_pattern,
      .alpha_pattern = flags.alpha_pattern,
      .bias = flags.bias,
      .use_dora = flags.use_dora};
}

ModelFiles classifier_files(PreTrainedModel model, Tokenizer tokenizer,
                            const std::optional<LoraConfig>& lora) {
  ModelFiles files;
  if (lora) {
    files.save = [model, tokenizer, lora](const std::filesystem::path& folder) mutable {
      write_file_atomically(folder / "config.json", model->config().to_json().dump(2) + "\n");
      save_adapter(*model, *lora, folder);
      tokenizer.save_pretrained(folder);
    };
    files.load = [model](const std::filesystem::path& folder) mutable {
      load_adapter(model.ptr(), folder);
    };
    return files;
  }
  files.save = [model, tokenizer](const std::filesystem::path& folder) mutable {
    model->save_pretrained(folder);
    tokenizer.save_pretrained(folder);
  };
  files.load = [model](const std::filesystem::path& folder) mutable {
    const auto saved = model_from_pretrained(folder.string(), model->task());
    const at::NoGradGuard no_grad;
    const auto source = saved->named_parameters();
    for (auto& parameter : model->named_parameters()) {
      parameter.value().copy_(source[parameter.key()]);
    }
  };
  return files;
}

int tokenizer_threads() {
  return std::min(threads_per_rank(world_from_environment()), at::get_num_threads());
}

TextTableOptions table_options(const TableFlags& flags, const Task& task) {
  TextTableOptions options;
  options.text_column = flags.text_column.empty() ? task.text_column : flags.text_column;
  options.text_pair_column = flags.text_pair_column;
  options.label_column = flags.label_column.empty() ? task.label_column : flags.label_column;
  options.delimiter = flags.delimiter;
  options.has_header = !flags.no_header;
  options.filters = flags.filters;
  return options;
}

TextTableOptions labelled_table(const TableFlags& flags, const Task& task, Head head,
                                const std::vector<std::string>& model_labels) {
  TextTableOptions table = table_options(flags, task);
  table.problem_type = head;
  if (head == Head::multi_label) {
    table.label_separator = flags.label_separator;
    if (table.label_separator.empty()) {
      table.label_columns = flags.label_columns.empty() ? model_labels : split(flags.label_columns);
    }
  }
  return table;
}

void set_documents(TextTableOptions& table, const TableFlags& flags, const Task& task,
                   SampleBy sample_by, const TextFiles& files) {
  if (task.head != ModelTask::causal_lm) {
    return;
  }
  table.documents = true;
  table.sample_by = sample_by;
  if (flags.text_column.empty() && flags.text_pair_column.empty()) {
    table = with_document_columns(files, table);
  }
}

void warn_of_truncated_texts(const TextModel& model, int64_t truncated, int64_t texts) {
  if (truncated > 0) {
    log_warning(format_count(truncated) + " of " + format_count(texts) + " texts truncated to " +
                std::to_string(model.max_length) + " tokens");
  }
}

std::unique_ptr<Trainer> make_evaluator(const TextModel& model, int64_t batch_size,
                                        std::shared_ptr<Accelerator> accelerator) {
  TrainingArguments arguments;
  arguments.save_strategy = SaveStrategy::no;
  arguments.disable_tqdm = true; // the command decides about a bar
  arguments.per_device_eval_batch_size = batch_size;
  arguments.precision = model.precision; // gives the same values as in the run
  arguments.label_smoothing_factor = model.label_smoothing_factor;
  arguments.class_weights = model.class_weights;
  const ProblemType type = model.problem_type();
  return std::make_unique<Trainer>(
      model.model.ptr(), model.task->loss(model.model, type), arguments, nullptr, nullptr,
      model.task->metrics(type, model.labels()), std::move(accelerator));
}

void require_finite_logits(const TextModel& model, const at::Tensor& logits,
                           const std::string& where, const std::string& source) {
  const at::Tensor good = logits.view({logits.size(0), -1}).isfinite().all(1);
  if (good.all().item<bool>()) {
    return;
  }
  const int64_t row = good.to(at::kInt).argmin().item<int64_t>() + 1;
  std::string weight;
  for (const auto& parameter : model.model->named_parameters()) {
    if (weight.empty() && !parameter.value().isfinite().all().item<bool>()) {
      weight = ": weight " + parameter.key() + " is not finite";
    }
  }
  throw InputError(where,
                   "the model's logits of row=" + std::to_string(row) + " of " + source +
                       " are not finite" + weight,
                   "finite logits", "use an earlier checkpoint, or train again");
}

} // namespace hasten::detail
