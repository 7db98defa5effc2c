// BERT classifiers from and to folders in Hugging Face's layout: config.json and
// model.safetensors. Tokenizer files are hasten/data/tokenizer.h's affair.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "hasten/models/bert.h"

namespace hasten {

struct LoadBertOptions {
  /// Names of the labels the caller needs, [label id]. Nothing keeps the
  /// folder's. The folder's names in another order permute its classifier; other
  /// names give a fresh one.
  std::optional<std::vector<std::string>> id2label{};
  /// problem_type of the caller's head; nothing keeps the folder's.
  std::optional<std::string> problem_type{};
  /// For a shape name: rows of the word embeddings. 0 takes bert-base's 30522.
  int64_t vocab_size = 0;
  /// For a shape name: the id of [PAD].
  int64_t pad_token_id = 0;
};

struct LoadedBert {
  BertForSequenceClassification model{nullptr};
  BertConfig config{};
  /// Whether classifier or pooler have fresh weights.
  bool fresh_classifier = false;
  bool fresh_pooler = false;
  /// One line each for what the user should know ("the classifier is new: …").
  /// Nothing was logged.
  std::vector<std::string> report{};
};

/// Builds a classifier from `model`: a folder, or the name of a shape
/// (BertConfig::from_shape) for random weights. Local; every rank that calls it
/// after the same hasten::set_seed gets the same weights. Weights of other
/// floating types are converted to float32. The model is in training mode.
/// Accepts names with and without "bert.", gamma and beta for LayerNorm, and
/// sharded files (model.safetensors.index.json); leaves out heads it does not
/// have (cls.*) and buffers (position_ids).
/// Memory: the model and one tensor of the file.
/// Throws InputError listing every missing, unexpected and wrongly shaped tensor;
/// where only pytorch_model.bin is there; where the model_type is not "bert".
LoadedBert load_bert_classifier(const std::string& model, const LoadBertOptions& options = {});

/// config.json of a folder alone: labels and sizes before any weight is read.
/// Throws InputError as load_bert_classifier.
BertConfig read_bert_config(const std::filesystem::path& folder);

/// Writes config.json and model.safetensors into an existing folder; for a whole
/// model at once make it FolderCommit::folder(), add the other files and commit.
/// Local: one rank calls it. Throws Error naming path and reason.
void save_bert_classifier(const std::filesystem::path& folder,
                          BertForSequenceClassificationImpl& model);

} // namespace hasten
