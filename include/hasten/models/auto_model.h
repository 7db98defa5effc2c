// Models of a task from a Hugging Face folder or a configuration, like transformers' AutoModelFor…
//
//   auto model = hasten::AutoModelForSequenceClassification::from_pretrained("distilbert-sst2");
//   auto [loss, logits] = model->forward({.input_ids = ids, .labels = labels});
//   model->save_pretrained("out");
//
// hasten/text/tokenizer.h handles the tokenizer's files.
// Threading: free functions; a model belongs to one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hasten/models/pretrained_model.h"

namespace hasten {

struct FromPretrainedOptions {
  /// Label names that the caller needs, [label id]. If not set, the folder's names are used. The
  /// same names in another order permute the rows of the head's last layer. Other names give a new
  /// last layer.
  std::optional<std::vector<std::string>> id2label{};
  /// problem_type of the model. If not set, the folder's.
  std::optional<std::string> problem_type{};
  /// PreTrainedConfig::attn_implementation.
  std::string attn_implementation = "auto";
  /// For a shape name: vocabulary size. 0 means 30522, that of bert-base.
  int64_t vocab_size = 0;
  /// For a shape name: id of the padding token.
  int64_t pad_token_id = 0;
  /// For a shape name: the token that ends a text, with which generation stops. -1: none.
  int64_t eos_token_id = -1;
};

/// A model with random weights, in training mode. Draws them from torch's default generator. With
/// initialize = false they are uninitialised; load all of them. Throws InputError as
/// PreTrainedConfig::validate and the family do.
PreTrainedModel model_from_config(const PreTrainedConfig& config, ModelTask task,
                                  bool initialize = true);

/// `model` is a folder, the name of a repository in Hugging Face's cache
/// (hasten/text/pretrained_folder.h), or the name of a shape (AutoConfig::from_shape) for random
/// weights. Local.
/// Every rank that calls it after the same hasten::set_seed gets the same weights. Weights of other
/// floating types are converted to float32. The model is in training mode; loading_info() says what
/// is new in it.
/// Accepts names with and without base_model_prefix, gamma and beta for LayerNorm, and sharded files
/// (model.safetensors.index.json). Parts of the head, and BERT's pooler, that the folder does not
/// have are new. Ignores heads of other tasks and buffers (position_ids).
/// Memory: the model and one tensor of the file.
/// Throws InputError that lists every missing, unexpected and wrongly shaped tensor; if the folder
/// has only pytorch_model.bin (the message has a command that converts it); if no family has its
/// model_type; or as pretrained_folder does.
PreTrainedModel model_from_pretrained(const std::string& model, ModelTask task,
                                      const FromPretrainedOptions& options = {});

template <ModelTask kTask>
struct AutoModelFor {
  static PreTrainedModel from_config(const PreTrainedConfig& config) {
    return model_from_config(config, kTask);
  }
  static PreTrainedModel from_pretrained(const std::string& model,
                                         const FromPretrainedOptions& options = {}) {
    return model_from_pretrained(model, kTask, options);
  }
};
using AutoModelForSequenceClassification = AutoModelFor<ModelTask::sequence_classification>;
using AutoModelForTokenClassification = AutoModelFor<ModelTask::token_classification>;
using AutoModelForMaskedLM = AutoModelFor<ModelTask::masked_lm>;
using AutoModelForCausalLM = AutoModelFor<ModelTask::causal_lm>;

} // namespace hasten
