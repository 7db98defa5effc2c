#include "hasten/models/auto_model.h"

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
#include "hasten/core/memory_rehearsal.h"
#include "hasten/io/safetensors.h"
#include "hasten/io/sharded_safetensors.h"
#include "hasten/models/lora.h"
#include "hasten/models/model_family.h"
#include "hasten/models/step_memory.h"
#include "hasten/text/pretrained_folder.h"
#include "lora_layer.h"

namespace hasten {

namespace detail {

constexpr const char* kLoadWhere = "models::from_pretrained";

// Writes all tensors of a folder's pickles, also of several, as one file of safetensors.
std::string conversion_command(const std::filesystem::path& folder) {
  return "python -c \"import glob, torch, safetensors.torch as s; s.save_file({k: "
         "v.contiguous().clone() for f in glob.glob('" +
         (folder / "pytorch_model*.bin").string() +
         "') for k, v in torch.load(f, 'cpu').items()}, '" +
         (folder / "model.safetensors").string() + "', {'format': 'pt'})\"";
}

// Opens the weight files of a folder. `model`: how the user named it.
std::vector<SafetensorsReader> open_weights(const std::filesystem::path& folder,
                                            const std::string& model) {
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
    const std::string download = hf_download_command(model);
    throw InputError(kLoadWhere,
                     single.string() + ": the file is missing" +
                         (pickle ? ", the folder has only pytorch_model.bin (a pickle)" : ""),
                     "weights as safetensors",
                     pickle             ? "convert them once: " + conversion_command(folder)
                     : download.empty() ? "name a folder that save_pretrained or hasten wrote"
                                        : download);
  }
  return readers;
}

struct FoundTensor {
  const SafetensorsReader* reader = nullptr;
  std::string name{}; // in the file

  at::Tensor read() const { return reader->read(name); }
  bool equals(const FoundTensor& other) const {
    const auto& mine = reader->entry(name);
    const auto& its = other.reader->entry(other.name);
    return mine.shape == its.shape && mine.dtype == its.dtype && at::equal(read(), other.read());
  }
};

std::string module_of(const std::string& parameter) {
  return parameter.substr(0, parameter.rfind('.'));
}

// Loads one folder into a new model.
class FolderLoad {
 public:
  FolderLoad(const std::string& model, ModelTask task, const FromPretrainedOptions& options);
  PreTrainedModel load();

 private:
  void find_weights();
  void decide_output(const FromPretrainedOptions& options);
  void check_size() const;
  void settle_tied_weight();
  void check_weights();
  void report();
  void copy_weights();
  bool may_be_new(const std::string& parameter) const;
  // Whether the folder has a tensor of that module itself.
  bool has(const std::string& module) const {
    const auto first = tensors_.lower_bound(module + ".");
    return first != tensors_.end() && first->first.starts_with(module + ".");
  }

  ModelTask task_;
  PreTrainedConfig config_;
  std::filesystem::path path_;
  const ModelFamily& family_;
  std::string base_; // "bert."
  std::string output_{}; // the head's last layer
  std::string reason_ = "the folder has none"; // why it is new
  std::vector<SafetensorsReader> readers_;
  std::map<std::string, FoundTensor> tensors_{}; // by current name
  std::vector<std::string> buffers_{}; // that the model makes itself
  std::optional<std::vector<int64_t>> rows_{}; // order of the last layer's rows
  LoadingInfo info_{};
  PreTrainedModel model_{nullptr};
};

FolderLoad::FolderLoad(const std::string& model, ModelTask task,
                       const FromPretrainedOptions& options)
    : task_(task),
      config_(AutoConfig::from_pretrained(model)),
      path_(pretrained_folder(model)),
      family_(model_family(config_.model_type)),
      base_(family_.base_model_prefix + "."),
      readers_(open_weights(path_, model)) {
  find_weights();
  decide_output(options);
}

void FolderLoad::find_weights() {
  // The parts of the encoder: names without its prefix begin with them.
  std::set<std::string> parts;
  {
    const MemoryRehearsal rehearsal;
    PreTrainedConfig small = config_;
    small.num_hidden_layers = 1;
    const PreTrainedModel model = model_from_config(small, task_, false);
    output_ = model->output_layer();
    for (const auto& name : model->named_parameters().keys()) {
      if (name.starts_with(base_)) {
        parts.insert(name.substr(base_.size(), name.find('.', base_.size()) - base_.size()));
      }
    }
  }
  for (const auto& reader : readers_) {
    for (const auto& name : reader.names()) {
      std::string current = family_.current_name ? family_.current_name(name) : name;
      if (current.empty()) {
        buffers_.push_back(name);
        continue;
      }
      const bool in_base = current.starts_with(base_);
      const std::string rest = in_base ? current.substr(base_.size()) : current;
      const bool of_encoder = parts.contains(rest.substr(0, rest.find('.')));
      if (of_encoder && !in_base) {
        current = base_ + rest;
      } else if (in_base && !of_encoder) { // a pooler that this model has not
        info_.unexpected_keys.push_back(name);
        continue;
      }
      const FoundTensor found{&reader, name};
      const auto [place, is_new] = tensors_.emplace(current, found);
      if (!is_new && !found.equals(place->second)) {
        throw InputError(kLoadWhere,
                         reader.path().string() + ": \"" + current +
                             "\" occurs twice with different values, under old and new names or in "
                             "two files");
      }
    }
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

// Decides whether the last layer of a classifier is the folder's.
void FolderLoad::decide_output(const FromPretrainedOptions& options) {
  const auto names_there = config_.id2label;
  config_.id2label = options.id2label.value_or(names_there);
  config_.problem_type = options.problem_type.value_or(config_.problem_type);
  config_.attn_implementation = options.attn_implementation;
  const bool of_samples = task_ == ModelTask::sequence_classification;
  if ((!of_samples && task_ != ModelTask::token_classification) || !has(output_)) {
    return;
  }
  rows_ = label_order(config_.id2label, names_there);
  const bool of_other_task =
      !config_.has_head(task_) && config_.has_head(of_samples ? ModelTask::token_classification
                                                              : ModelTask::sequence_classification);
  if (rows_ && !of_other_task) {
    return;
  }
  reason_ = of_other_task ? "the folder's classifier is that of a " + joined(config_.architectures)
                          : "the folder's classifier has the labels " + joined(names_there);
  std::erase_if(tensors_, [&](const auto& each) { return module_of(each.first) == output_; });
}

// Runs before anything of config.json's sizes is allocated. It accepts sizes up to about those of
// the weights; check_weights() then compares them one by one.
void FolderLoad::check_size() const {
  // Weights may be in 16 bits. Some may be missing; check_weights() names them.
  double there = 1e6;
  for (const auto& [name, tensor] : tensors_) {
    const auto& entry = tensor.reader->entry(tensor.name);
    there += 4.0 * static_cast<double>(entry.end - entry.begin);
  }
  // The head may be new.
  double needed =
      1e3 * static_cast<double>(config_.num_hidden_layers) -
      4.0 * static_cast<double>((config_.num_labels() + config_.hidden_size) * config_.hidden_size);
  if (needed <= there) {
    for (const auto& shape : parameter_shapes(config_, task_)) {
      needed += std::accumulate(shape.begin(), shape.end(), 4.0, std::multiplies<double>());
    }
  }
  if (needed > there) {
    throw InputError(
        kLoadWhere,
        (path_ / "config.json").string() +
            ": its sizes give a model larger than the folder's weights: " + "vocab_size=" +
            std::to_string(config_.vocab_size) +
            ", hidden_size=" + std::to_string(config_.hidden_size) +
            ", num_hidden_layers=" + std::to_string(config_.num_hidden_layers) +
            ", intermediate_size=" + std::to_string(config_.intermediate_size) +
            ", max_position_embeddings=" + std::to_string(config_.max_position_embeddings) +
            ", type_vocab_size=" + std::to_string(config_.type_vocab_size),
        "the configuration that the weights were saved with");
  }
}

// Modules of the head, and BERT's pooler, may be missing as a whole.
bool FolderLoad::may_be_new(const std::string& parameter) const {
  const std::string module = module_of(parameter);
  return !has(module) &&
         (!parameter.starts_with(base_) || module.find(".pooler.") != std::string::npos);
}

// Some files have the weight that the output layer takes from the word embeddings a second time, or
// under the output layer's name alone. Values that differ count, as in transformers.
void FolderLoad::settle_tied_weight() {
  const TiedWeight tied = model_->tied_weight();
  const auto output = tensors_.find(tied.output);
  if (output == tensors_.end()) {
    return;
  }
  const auto embeddings = tensors_.find(tied.embeddings);
  if (embeddings != tensors_.end() && !output->second.equals(embeddings->second)) {
    model_->untie_weights();
    info_.report.push_back(tied.output +
                           " is not tied: the folder has other values for it than for " +
                           tied.embeddings);
    return;
  }
  tensors_.insert({tied.embeddings, output->second});
  tensors_.erase(tied.output);
}

// Compares names and shapes. Throws one error with all differences.
void FolderLoad::check_weights() {
  std::vector<std::string> missing, unexpected, wrong;
  const auto parameters = model_->named_parameters();
  for (const auto& parameter : parameters) {
    const std::string& name = parameter.key();
    const auto match = tensors_.find(name);
    if (match == tensors_.end()) {
      (may_be_new(name) ? info_.missing_keys : missing).push_back(name);
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
  for (const auto& [name, tensor] : tensors_) {
    if (!parameters.contains(name)) {
      const bool in_base = name.starts_with(base_);
      (in_base ? unexpected : info_.unexpected_keys).push_back(in_base ? name : tensor.name);
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
        path_.string() + ": the weights do not fit config.json: " + joined(problems, "; "),
        "the tensors of a " + joined(model_->config().architectures) + " of that configuration");
  }
}

void FolderLoad::report() {
  std::set<std::string> modules; // new ones of the head
  bool pooler = false;
  for (const std::string& name : info_.missing_keys) {
    if (name.starts_with(base_)) {
      pooler = true;
    } else {
      modules.insert(module_of(name));
    }
  }
  info_.new_output = modules.contains(task_ == ModelTask::masked_lm ? module_of(output_) : output_);
  if (!modules.empty()) {
    const bool only_output = info_.new_output && modules.size() == 1;
    const std::vector<std::string> names(modules.begin(), modules.end());
    info_.report.push_back((only_output ? "the classifier is new, with random weights: "
                                        : "new, with random weights: " + joined(names) + ": ") +
                           reason_);
  }
  if (pooler) {
    info_.report.push_back("the pooler is new, with random weights: the folder has none");
  }
  if (!info_.unexpected_keys.empty()) {
    info_.report.push_back("ignored weights of other tasks: " + joined(info_.unexpected_keys));
  }
  if (!buffers_.empty()) {
    info_.report.push_back("ignored buffers, which the model computes itself: " + joined(buffers_));
  }
}

void FolderLoad::copy_weights() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : model_->named_parameters()) {
    const auto match = tensors_.find(parameter.key());
    if (match == tensors_.end()) {
      model_->init_weight(parameter.key(), parameter.value());
      continue;
    }
    const auto& [reader, name] = match->second;
    at::Tensor weights = in_deferred_init() ? reader->tensor(name) : match->second.read();
    if (rows_ && module_of(parameter.key()) == output_) {
      weights = weights.index_select(0, at::tensor(*rows_, at::kLong));
    }
    parameter.value().copy_(weights); // converts other floating types
  }
}

PreTrainedModel FolderLoad::load() {
  check_size();
  config_.dtype = "float32";
  model_ = model_from_config(config_, task_, false);
  settle_tied_weight();
  check_weights();
  report();
  copy_weights();
  model_->set_loading_info(info_);
  if (const auto path = path_ / "generation_config.json"; std::filesystem::exists(path)) {
    model_->set_generation_config(read_file(path));
  }
  return model_;
}

// Loads the base of an adapter and then the adapter. The labels are those of the adapter's config.json.
PreTrainedModel model_from_adapter(const std::filesystem::path& folder, ModelTask task,
                                   FromPretrainedOptions options) {
  const std::string base = LoraConfig::base_of(folder);
  const PreTrainedConfig config = AutoConfig::from_pretrained(folder.string());
  options.id2label = options.id2label.value_or(config.id2label);
  options.problem_type = options.problem_type.value_or(config.problem_type);
  PreTrainedModel model = FolderLoad(base, task, options).load();
  LoadingInfo info = model->loading_info();
  const LoraConfig lora = load_adapter(model.ptr(), folder);
  const auto loaded = [&](const std::string& name) {
    return inside_modules(name, lora.modules_to_save);
  };
  std::erase_if(info.missing_keys, loaded);
  info.new_output = info.new_output && !loaded(model->output_layer() + ".weight");
  info.report.clear();
  if (!info.missing_keys.empty()) {
    info.report.push_back("new, with random weights: " + joined(info.missing_keys));
  }
  model->set_loading_info(info);
  return model;
}

PreTrainedModel model_from_shape(const std::string& shape, ModelTask task,
                                 const FromPretrainedOptions& options) {
  PreTrainedConfig config = options.vocab_size > 0
                                ? AutoConfig::from_shape(shape, options.vocab_size)
                                : AutoConfig::from_shape(shape);
  config.pad_token_id = options.pad_token_id;
  config.id2label = options.id2label.value_or(config.id2label);
  config.problem_type = options.problem_type.value_or("");
  config.attn_implementation = options.attn_implementation;
  if (options.eos_token_id >= 0) {
    auto others = parse_json(kLoadWhere, "other_keys", config.other_keys);
    others["eos_token_id"] = options.eos_token_id;
    config.other_keys = others.dump();
  }
  PreTrainedModel model = model_from_config(config, task);
  model->set_loading_info({.missing_keys = model->named_parameters().keys(),
                           .new_output = true,
                           .report = {"all weights are random: " + shape + " is a shape"}});
  return model;
}

} // namespace detail

PreTrainedModel model_from_pretrained(const std::string& model, ModelTask task,
                                      const FromPretrainedOptions& options) {
  std::error_code ignored;
  if (AutoConfig::is_shape(model) && !std::filesystem::exists(model, ignored)) {
    return detail::model_from_shape(model, task, options);
  }
  if (const auto folder = pretrained_folder(model); LoraConfig::is_adapter(folder)) {
    return detail::model_from_adapter(folder, task, options);
  }
  return detail::FolderLoad(model, task, options).load();
}

} // namespace hasten
