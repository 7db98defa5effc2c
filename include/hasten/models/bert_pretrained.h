// Loads and saves BERT classifiers in Hugging Face's layout: config.json and model.safetensors.
// hasten/text/tokenizer.h handles the tokenizer's files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "hasten/models/bert.h"

namespace hasten {

struct LoadBertOptions {
  /// Label names that the caller needs, [label id]. If not set, the folder's names are used. The
  /// same names in another order permute the classifier's weights. Other names give a new
  /// classifier.
  std::optional<std::vector<std::string>> id2label{};
  /// problem_type of the model. If not set, the folder's.
  std::optional<std::string> problem_type{};
  /// For a shape name: vocabulary size. 0 means 30522, that of bert-base.
  int64_t vocab_size = 0;
  /// For a shape name: id of [PAD].
  int64_t pad_token_id = 0;
};

struct LoadedBert {
  BertForSequenceClassification model{nullptr};
  BertConfig config{};
  /// Whether the classifier or the pooler has new weights.
  bool fresh_classifier = false;
  bool fresh_pooler = false;
  /// Sentences for the user ("the classifier is new, with random weights: …"). Nothing is logged.
  std::vector<std::string> report{};
};

/// Builds a classifier. `model` is a folder, or the name of a shape (BertConfig::from_shape) for
/// random weights. Local. Every rank that calls it after the same hasten::set_seed gets the same
/// weights. Weights of other floating types are converted to float32. The model is in training
/// mode.
/// Accepts names with and without "bert.", gamma and beta for LayerNorm, and sharded files
/// (model.safetensors.index.json). Ignores heads of other tasks (cls.*) and buffers (position_ids).
/// Memory: the model and one tensor of the file.
/// Throws InputError that lists every missing, unexpected and wrongly shaped tensor; if the folder
/// has only pytorch_model.bin; or if its model_type is not "bert".
LoadedBert load_bert_classifier(const std::string& model, const LoadBertOptions& options = {});

/// Reads only config.json of a folder: labels and sizes, before any weight is read. Throws
/// InputError as load_bert_classifier does.
BertConfig read_bert_config(const std::filesystem::path& folder);

/// Writes config.json and model.safetensors into an existing folder. To replace a whole model
/// folder atomically, pass FolderCommit::folder(), add the other files and commit. Local: call it
/// on one rank. Throws Error with path and reason.
void save_bert_classifier(const std::filesystem::path& folder,
                          BertForSequenceClassificationImpl& model);

} // namespace hasten
