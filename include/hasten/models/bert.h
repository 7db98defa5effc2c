// BERT for sequence classification, with Hugging Face's configuration, parameter names and results.
// It calls its repeated blocks through hasten::call_block.
// Shapes: B samples, T tokens, H hidden_size, L num_labels.
// Threading: one thread per model, as for torch::nn::Module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hasten {

/// config.json of a BERT. The defaults are those of bert-base-uncased.
struct BertConfig {
  int64_t vocab_size = 30522;
  int64_t hidden_size = 768;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t intermediate_size = 3072;
  /// Largest number of tokens of an input.
  int64_t max_position_embeddings = 512;
  int64_t type_vocab_size = 2;
  /// This row of the word embeddings starts at 0 and gets no gradient.
  int64_t pad_token_id = 0;
  /// "gelu" (exact), "gelu_new" (tanh) or "relu".
  std::string hidden_act = "gelu";
  double hidden_dropout_prob = 0.1;
  double attention_probs_dropout_prob = 0.1;
  /// Dropout before the classifier. If not set: hidden_dropout_prob.
  std::optional<double> classifier_dropout{};
  /// Standard deviation of new weights.
  double initializer_range = 0.02;
  double layer_norm_eps = 1e-12;
  /// [label id] -> name; its size is num_labels.
  std::vector<std::string> id2label = {"LABEL_0", "LABEL_1"};
  /// "single_label_classification", …; empty if the file has no problem_type.
  std::string problem_type{};
  /// `architectures` of the file: classes of the saved model. to_json() always writes
  /// "BertForSequenceClassification".
  std::vector<std::string> architectures{};
  /// dtype of the weights in files: "float32", "bfloat16", "float16".
  std::string dtype = "float32";
  /// All other keys of the file, as the text of a JSON object. to_json() writes them unchanged.
  std::string other_keys = "{}";

  int64_t num_labels() const { return static_cast<int64_t>(id2label.size()); }

  /// Reads config.json. Messages use `source` as the file's name.
  /// Throws InputError with key and value for a model_type other than "bert", a value out of range,
  /// an unsupported hidden_act, or gaps in id2label.
  static BertConfig from_json(const nlohmann::json& json, std::string_view source = "config.json");
  /// Configuration of a named shape: "bert-tiny" (2 layers, hidden_size 128), "bert-mini" (4, 256),
  /// "bert-small" (4, 512), "bert-base" (12, 768). Heads have size 64; intermediate_size is 4 ·
  /// hidden_size. Throws InputError for another name; the message lists these.
  static BertConfig from_shape(std::string_view shape, int64_t vocab_size = 30522);
  /// Whether `name` is the name of a shape.
  static bool is_shape(std::string_view name);
  /// All names: "bert-tiny, bert-mini, …".
  static std::string shapes_text();
  /// config.json for transformers: with architectures, model_type, id2label, label2id and
  /// other_keys.
  nlohmann::json to_json() const;
  /// Throws InputError with the first value that is out of range.
  void validate(std::string_view source = "BertConfig") const;
};

/// One block: self-attention and feed-forward, each followed by residual and LayerNorm. No dropout
/// in evaluation mode.
class BertLayerImpl : public torch::nn::Module {
 public:
  explicit BertLayerImpl(const BertConfig& config);
  /// `hidden` [B, T, H]. `mask` is undefined if no token is padding, else [B, 1, 1, T] of hidden's
  /// dtype: 0 to attend, the lowest finite value to ignore. Returns [B, T, H]. With
  /// first_token_only it returns [B, 1, H] and skips the other tokens' queries and feed-forward
  /// (5/6 of a block's products).
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, bool first_token_only = false);

  // Names in the state dict: attention.self.query, …
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr};
  torch::nn::Linear attention_output{nullptr}; // attention.output.dense
  torch::nn::LayerNorm attention_norm{nullptr}; // attention.output.LayerNorm
  torch::nn::Linear intermediate{nullptr}; // intermediate.dense
  torch::nn::Linear output{nullptr}; // output.dense
  torch::nn::LayerNorm output_norm{nullptr}; // output.LayerNorm

 private:
  // `asking` [B, Q, H] are the tokens that need a context.
  at::Tensor attend(const at::Tensor& asking, const at::Tensor& hidden, const at::Tensor& mask);

  int64_t heads_;
  double hidden_dropout_;
  double attention_dropout_;
  std::string activation_;
};
TORCH_MODULE(BertLayer);

/// Embeddings, blocks and pooler ("bert." in the state dict).
class BertModelImpl : public torch::nn::Module {
 public:
  explicit BertModelImpl(const BertConfig& config);
  /// Returns the last block's hidden states: [B, T, H], or with first_token_only those of the first
  /// token, [B, 1, H], which pool() reads. For the other arguments see
  /// BertForSequenceClassificationImpl::forward.
  at::Tensor forward(at::Tensor input_ids, at::Tensor attention_mask = {},
                     at::Tensor token_type_ids = {}, bool first_token_only = false);
  /// tanh(dense(hidden[:, 0])): [B, T, H] -> [B, H].
  at::Tensor pool(const at::Tensor& hidden);

  torch::nn::Embedding word_embeddings{nullptr};
  torch::nn::Embedding position_embeddings{nullptr};
  torch::nn::Embedding token_type_embeddings{nullptr};
  torch::nn::LayerNorm embedding_norm{nullptr}; // embeddings.LayerNorm
  std::vector<BertLayer> layers{}; // encoder.layer.i
  torch::nn::Linear pooler{nullptr}; // pooler.dense

 private:
  at::Tensor embed(const at::Tensor& input_ids, const at::Tensor& types);

  double hidden_dropout_;
};
TORCH_MODULE(BertModel);

/// A BERT with a classifier on the pooled state of the first token.
class BertForSequenceClassificationImpl : public torch::nn::Module {
 public:
  /// Draws weights from torch's default generator: normal(0, initializer_range) for matrices and
  /// embeddings, 0 for biases and the padding token's embedding, 1 and 0 for LayerNorm. After
  /// hasten::set_seed they are equal on all ranks. With initialize = false the weights are
  /// uninitialised; load all of them.
  /// Throws InputError as BertConfig::validate does.
  explicit BertForSequenceClassificationImpl(BertConfig config, bool initialize = true);
  /// `input_ids` [B, T] int64 below vocab_size. `attention_mask` [B, T] int64 or bool, 1 for tokens
  /// and 0 for padding; undefined means all 1. `token_type_ids` [B, T] int64; undefined means all
  /// 0. Returns logits [B, L].
  /// Throws InputError if T is above max_position_embeddings.
  at::Tensor forward(at::Tensor input_ids, at::Tensor attention_mask = {},
                     at::Tensor token_type_ids = {});
  /// Draw new weights for the classifier or the pooler, as the constructor does.
  void reset_classifier();
  void reset_pooler();

  const BertConfig& config() const { return config_; }
  /// The repeated blocks, in order.
  const std::vector<BertLayer>& blocks() const { return bert->layers; }

  BertModel bert{nullptr};
  torch::nn::Linear classifier{nullptr};

 private:
  BertConfig config_;
};
TORCH_MODULE(BertForSequenceClassification);

} // namespace hasten
