// The registry of model families, by the model_type of config.json. hasten has encoders, such as
// "bert", and decoders, such as "llama". A program registers others at its start; then AutoConfig and
// the AutoModelFor… classes know them.
// Threading: any thread may call every function.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/models/pretrained_model.h"

namespace hasten {

struct ModelFamily {
  /// Of config.json: "distilbert".
  std::string model_type{};
  /// Start of the names of transformers' classes: "DistilBert" for
  /// "DistilBertForSequenceClassification".
  std::string class_prefix{};
  /// Classes that are not class_prefix + "For" + task_name: GPT-2's "GPT2LMHeadModel".
  std::map<ModelTask, std::string> class_names{};
  /// The module with the encoder, without the head: "distilbert" for "distilbert.embeddings.…". A
  /// folder may have names without it.
  std::string base_model_prefix{};
  /// The tasks for which it has a head.
  std::vector<ModelTask> tasks = {ModelTask::sequence_classification,
                                  ModelTask::token_classification, ModelTask::masked_lm};
  /// Values of keys that a config.json does not have.
  PreTrainedConfig defaults{};
  /// PreTrainedConfig's field -> the family's key in config.json: {"hidden_size", "dim"}. An empty
  /// key means that the family has none. Fields that are not named have their own names.
  std::map<std::string, std::string> attribute_map{};
  /// Position embeddings begin after row pad_token_id, as RoBERTa's do.
  bool positions_after_padding = false;
  /// Makes a model whose weights may be uninitialised (init_weight draws them). Throws InputError
  /// for an option that the family does not have.
  std::function<std::shared_ptr<PreTrainedModelImpl>(const PreTrainedConfig& config,
                                                     ModelTask task)>
      make{};
  /// The linear layers that get_peft_model adapts if LoraConfig names none: PEFT's default,
  /// where it has one.
  std::vector<std::string> lora_target_modules{};
  /// Optional: the parameter's name for a tensor's name in a file, such as an older one; empty for
  /// buffers, which the model makes itself.
  std::function<std::string(const std::string& name)> current_name{};

  /// The folder of a model that hasten.export wrote, whose graph runs. Empty for other families.
  std::filesystem::path program{};

  /// Name of transformers' class for a task.
  std::string class_name(ModelTask task) const;
};

/// Adds a family, for the rest of the process. Throws InputError if model_type, class_prefix or make
/// is empty, or if there is a family of that model_type.
void register_model_family(ModelFamily family);

/// Throws InputError that names `source` and all families if there is none of that type.
const ModelFamily& model_family(std::string_view model_type, std::string_view source = "model");

/// The model_type of each family, sorted, without those of single folders (ModelFamily::program).
std::vector<std::string> model_types();

} // namespace hasten
