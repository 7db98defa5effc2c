#include "hasten/models/bert_pretrained.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/core/deferred_init.h"
#include "hasten/io/safetensors.h"
#include "hasten/io/sharded_safetensors.h"
#include "hasten/models/bert_memory.h"

namespace hasten {

namespace detail {

constexpr const char* kLoadWhere = "models::load_bert_classifier";

// Opens the weight files of a folder.
std::vector<SafetensorsReader> open_weights(const std::filesystem::path& folder) {
  std::error_code ignored;
  std::vector<SafetensorsReader> readers;
  const auto single = folder / "model.safetensors";
  const auto index = folder / "model.safetensors.index.json";
  if (std::filesystem::exists(single, ignored)) {
    readers.emplace_back(single);
  } else if (std::filesystem::exists(index, ignored)) {
    readers = ShardedSafetensorsReader(index).shards();
  } else {
    const bool pickle = std::filesystem::exists(folder / "pytorch_model.bin", ignored) ||
                        std::filesystem::exists(folder / "pytorch_model.bin.index.json", ignored);
    throw InputError(kLoadWhere,
                     single.string() + ": the file is missing" +
                         (pickle ? ", the folder has only pytorch_model.bin (a pickle)" : ""),
                     "weights as safetensors",
                     pickle ? "convert them once in Python: AutoModel"
                              ".from_pretrained(folder).save_pretrained(folder)"
                            : "name a folder that save_pretrained or hasten wrote");
  }
  return readers;
}

void replace_suffix(std::string& name, std::string_view suffix, std::string_view by) {
  if (name.ends_with(suffix)) {
    name.replace(name.size() - suffix.size(), suffix.size(), by);
  }
}

// Converts legacy LayerNorm names and adds a missing "bert." prefix.
std::string current_name(std::string name) {
  replace_suffix(name, "LayerNorm.gamma", "LayerNorm.weight");
  replace_suffix(name, "LayerNorm.beta", "LayerNorm.bias");
  for (const char* part : {"embeddings.", "encoder.", "pooler."}) {
    if (name.starts_with(part)) {
      return "bert." + name;
    }
  }
  return name;
}

struct FoundTensor {
  const SafetensorsReader* reader = nullptr;
  std::string name{}; // in the file
};

// A folder while it is loaded.
struct BertFolder {
  std::filesystem::path path{};
  BertConfig config{};
  std::vector<SafetensorsReader> readers{};
  std::map<std::string, FoundTensor> tensors{}; // by current name
  std::vector<std::string> left_out{}; // heads of other tasks
  std::optional<std::vector<int64_t>> rows{}; // order of the classifier's rows

  bool has(const std::string& prefix) const {
    const auto first = tensors.lower_bound(prefix);
    return first != tensors.end() && first->first.starts_with(prefix);
  }
};

void find_weights(BertFolder& folder) {
  for (const auto& reader : folder.readers) {
    for (const auto& name : reader.names()) {
      const std::string current = current_name(name);
      if (current == "bert.embeddings.position_ids" ||
          current == "bert.embeddings.token_type_ids") {
        continue; // buffers of old files, not parameters
      }
      if (!current.starts_with("bert.") && !current.starts_with("classifier.")) {
        folder.left_out.push_back(name);
      } else if (!folder.tensors.emplace(current, FoundTensor{&reader, name}).second) {
        throw InputError(kLoadWhere,
                         reader.path().string() + ": \"" + current +
                             "\" occurs twice, under old and new names or in two files");
      }
    }
  }
}

// Runs before anything of config.json's sizes is allocated. It accepts sizes up to about those of
// the weights; check_weights() then compares them one by one.
void check_size(const BertFolder& folder) {
  const BertConfig& config = folder.config;
  // Weights may be in 16 bits. Some may be missing; check_weights() names them.
  double there = 1e6;
  for (const auto& [name, tensor] : folder.tensors) {
    const auto& entry = tensor.reader->entry(tensor.name);
    there += 4.0 * static_cast<double>(entry.end - entry.begin);
  }
  // The classifier may be new.
  double needed = 1e3 * static_cast<double>(config.num_hidden_layers) -
                  4.0 * static_cast<double>(config.num_labels() * config.hidden_size);
  if (needed <= there) {
    for (const auto& shape : bert_parameter_shapes(config)) {
      needed += std::accumulate(shape.begin(), shape.end(), 4.0, std::multiplies<double>());
    }
  }
  if (needed > there) {
    throw InputError(
        kLoadWhere,
        (folder.path / "config.json").string() +
            ": its sizes give a model larger than the folder's weights: " + "vocab_size=" +
            std::to_string(config.vocab_size) +
            ", hidden_size=" + std::to_string(config.hidden_size) +
            ", num_hidden_layers=" + std::to_string(config.num_hidden_layers) +
            ", intermediate_size=" + std::to_string(config.intermediate_size) +
            ", max_position_embeddings=" + std::to_string(config.max_position_embeddings) +
            ", type_vocab_size=" + std::to_string(config.type_vocab_size),
        "the configuration that the weights were saved with");
  }
}

// Compares names and shapes. Throws one error with all differences. New parts may be missing.
void check_weights(const BertFolder& folder, const LoadedBert& loaded) {
  std::vector<std::string> missing, unexpected, wrong;
  const auto parameters = loaded.model->named_parameters();
  for (const auto& parameter : parameters) {
    const std::string& name = parameter.key();
    const auto match = folder.tensors.find(name);
    if (match == folder.tensors.end()) {
      if (!(loaded.fresh_classifier && name.starts_with("classifier.")) &&
          !(loaded.fresh_pooler && name.starts_with("bert.pooler."))) {
        missing.push_back(name);
      }
      continue;
    }
    const auto& entry = match->second.reader->entry(match->second.name);
    if (at::IntArrayRef(entry.shape) != parameter.value().sizes() ||
        !at::isFloatingType(entry.dtype)) {
      wrong.push_back(name + " " + std::string(safetensors_dtype_name(entry.dtype)) +
                      c10::str(at::IntArrayRef(entry.shape)) + " instead of " +
                      c10::str(parameter.value().sizes()));
    }
  }
  for (const auto& [name, tensor] : folder.tensors) {
    if (!parameters.contains(name)) {
      unexpected.push_back(name);
    }
  }
  std::vector<std::string> problems;
  for (const auto& [kind, names] :
       {std::pair("missing", &missing), std::pair("unexpected", &unexpected),
        std::pair("wrongly shaped", &wrong)}) {
    if (!names->empty()) {
      problems.push_back(std::string(kind) + ": " + joined(*names));
    }
  }
  if (!problems.empty()) {
    throw InputError(
        kLoadWhere,
        folder.path.string() + ": the weights do not fit config.json: " + joined(problems, "; "),
        "the tensors of a BERT of that configuration");
  }
}

// Row i of the result is the folder's row for label `wanted[i]`. nullopt if the names differ.
std::optional<std::vector<int64_t>> label_order(const std::vector<std::string>& wanted,
                                                const std::vector<std::string>& folder) {
  std::vector<int64_t> order;
  for (const auto& name : wanted) {
    const auto at = std::ranges::find(folder, name);
    if (at == folder.end()) {
      return std::nullopt;
    }
    order.push_back(at - folder.begin());
  }
  const std::set<int64_t> distinct(order.begin(), order.end());
  const bool same = distinct.size() == folder.size() && order.size() == folder.size();
  return same ? std::optional(order) : std::nullopt;
}

void decide_classifier(BertFolder& folder, const LoadBertOptions& options, LoadedBert& loaded) {
  const auto names_there = folder.config.id2label;
  const auto& wanted = options.id2label ? *options.id2label : names_there;
  folder.rows = label_order(wanted, names_there);
  folder.config.id2label = wanted;
  folder.config.problem_type = options.problem_type.value_or(folder.config.problem_type);
  std::string reason;
  if (!folder.has("classifier.")) {
    reason = "the folder has none";
  } else if (!folder.rows) {
    reason = "the folder's classifier has the labels " + joined(names_there);
    folder.tensors.erase("classifier.weight");
    folder.tensors.erase("classifier.bias");
  }
  if (!reason.empty()) {
    loaded.fresh_classifier = true;
    loaded.report.push_back("the classifier is new, with random weights: " + reason);
  }
  if (!folder.has("bert.pooler.")) {
    loaded.fresh_pooler = true;
    loaded.report.push_back("the pooler is new, with random weights: the folder has none");
  }
  if (!folder.left_out.empty()) {
    loaded.report.push_back("ignored weights of other tasks: " + joined(folder.left_out));
  }
}

void copy_weights(const BertFolder& folder, BertForSequenceClassificationImpl& model) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    const auto match = folder.tensors.find(parameter.key());
    if (match == folder.tensors.end()) {
      continue;
    }
    const auto& [reader, name] = match->second;
    at::Tensor weights = in_deferred_init() ? reader->tensor(name) : reader->read(name);
    if (folder.rows && parameter.key().starts_with("classifier.")) {
      weights = weights.index_select(0, at::tensor(*folder.rows, at::kLong));
    }
    parameter.value().copy_(weights); // converts other floating types
  }
}

LoadedBert bert_from_shape(const std::string& shape, const LoadBertOptions& options) {
  LoadedBert loaded;
  loaded.config = options.vocab_size > 0 ? BertConfig::from_shape(shape, options.vocab_size)
                                         : BertConfig::from_shape(shape);
  loaded.config.pad_token_id = options.pad_token_id;
  if (options.id2label) {
    loaded.config.id2label = *options.id2label;
  }
  loaded.config.problem_type = options.problem_type.value_or("");
  loaded.model = BertForSequenceClassification(loaded.config);
  loaded.fresh_classifier = loaded.fresh_pooler = true;
  loaded.report.push_back("all weights are random: " + shape + " is a shape");
  return loaded;
}

} // namespace detail

BertConfig read_bert_config(const std::filesystem::path& folder) {
  std::error_code ignored;
  const auto path = folder / "config.json";
  if (!std::filesystem::is_directory(folder, ignored) || !std::filesystem::exists(path, ignored)) {
    throw InputError(
        detail::kLoadWhere, path.string() + ": the file is missing",
        "a Hugging Face model folder, or one of the shapes " + BertConfig::shapes_text());
  }
  return BertConfig::from_json(read_json_file(detail::kLoadWhere, path), path.string());
}

LoadedBert load_bert_classifier(const std::string& model, const LoadBertOptions& options) {
  std::error_code ignored;
  if (BertConfig::is_shape(model) && !std::filesystem::exists(model, ignored)) {
    return detail::bert_from_shape(model, options);
  }
  LoadedBert loaded;
  detail::BertFolder folder;
  folder.path = model;
  folder.config = read_bert_config(folder.path);
  folder.readers = detail::open_weights(folder.path);
  detail::find_weights(folder);
  detail::decide_classifier(folder, options, loaded);
  detail::check_size(folder);
  folder.config.dtype = "float32";
  loaded.config = folder.config;
  loaded.model = BertForSequenceClassification(
      std::make_shared<BertForSequenceClassificationImpl>(folder.config, /*initialize=*/false));
  detail::check_weights(folder, loaded);
  if (loaded.fresh_pooler) {
    loaded.model->reset_pooler();
  }
  if (loaded.fresh_classifier) {
    loaded.model->reset_classifier();
  }
  detail::copy_weights(folder, *loaded.model);
  return loaded;
}

void save_bert_classifier(const std::filesystem::path& folder,
                          BertForSequenceClassificationImpl& model) {
  NamedTensors weights;
  for (const auto& parameter : model.named_parameters()) {
    weights[parameter.key()] = parameter.value().detach();
  }
  write_file_atomically(folder / "config.json", model.config().to_json().dump(2) + "\n");
  write_safetensors(folder / "model.safetensors", weights);
}

} // namespace hasten
