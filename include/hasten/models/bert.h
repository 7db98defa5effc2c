// BERT for sequence classification, with Hugging Face's configuration, parameter
// names and numbers. Repeated blocks are called through hasten::call_block.
// Shapes: B rows, T tokens, H hidden_size, L num_labels.
// Threading: as torch::nn::Module: one thread per model.
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

/// config.json of a BERT. Defaults are those of bert-base-uncased.
struct BertConfig {
  int64_t vocab_size = 30522;
  int64_t hidden_size = 768;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t intermediate_size = 3072;
  /// Longest input in tokens.
  int64_t max_position_embeddings = 512;
  int64_t type_vocab_size = 2;
  /// This row of the word embeddings starts at 0 and gets no gradient.
  int64_t pad_token_id = 0;
  /// "gelu" (exact), "gelu_new" (tanh) or "relu".
  std::string hidden_act = "gelu";
  double hidden_dropout_prob = 0.1;
  double attention_probs_dropout_prob = 0.1;
  /// Before the classifier; nothing means hidden_dropout_prob.
  std::optional<double> classifier_dropout{};
  /// Standard deviation of fresh weights.
  double initializer_range = 0.02;
  double layer_norm_eps = 1e-12;
  /// [label id] -> name; its size is num_labels.
  std::vector<std::string> id2label = {"LABEL_0", "LABEL_1"};
  /// "single_label_classification", …; empty where the file says nothing.
  std::string problem_type{};
  /// Class names in the file: what its weights are of. to_json() says
  /// "BertForSequenceClassification" whatever is here.
  std::vector<std::string> architectures{};
  /// Of the weights in files: "float32", "bfloat16", "float16".
  std::string dtype = "float32";
  /// All other keys of the file as a JSON object's text; written back unchanged.
  std::string other_keys = "{}";

  int64_t num_labels() const { return static_cast<int64_t>(id2label.size()); }

  /// From config.json. `source` names the file in messages.
  /// Throws InputError naming key and value: a model_type other than "bert", a
  /// value out of range, an unsupported hidden_act, id2label with gaps.
  static BertConfig from_json(const nlohmann::json& json, std::string_view source = "config.json");
  /// A shape by name: "bert-tiny" (2 layers, 128 wide), "bert-mini" (4, 256),
  /// "bert-small" (4, 512), "bert-base" (12, 768); one head per 64 of width,
  /// intermediate_size 4 times the width. Throws InputError listing them.
  static BertConfig from_shape(std::string_view shape, int64_t vocab_size = 30522);
  /// Whether `name` is one of those.
  static bool is_shape(std::string_view name);
  /// All of them: "bert-tiny, bert-mini, …".
  static std::string shapes_text();
  /// What transformers reads: with architectures, model_type, id2label and
  /// label2id, and other_keys.
  nlohmann::json to_json() const;
  /// Throws InputError naming the first value that no model can have.
  void validate(std::string_view source = "BertConfig") const;
};

/// One block: self-attention and feed-forward, each with residual and LayerNorm
/// after it. In evaluation mode no dropout.
class BertLayerImpl : public torch::nn::Module {
 public:
  explicit BertLayerImpl(const BertConfig& config);
  /// `hidden` [B, T, H]; `mask` undefined where no token is padding, else
  /// [B, 1, 1, T] of hidden's dtype, 0 to attend and the lowest finite value not
  /// to. Returns [B, T, H], or with first_token_only [B, 1, H], which saves the
  /// other tokens' queries and feed-forward (5/6 of a block's products).
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, bool first_token_only = false);

  // Names in the state dict: attention.self.query, …
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr};
  torch::nn::Linear attention_output{nullptr}; // attention.output.dense
  torch::nn::LayerNorm attention_norm{nullptr}; // attention.output.LayerNorm
  torch::nn::Linear intermediate{nullptr}; // intermediate.dense
  torch::nn::Linear output{nullptr}; // output.dense
  torch::nn::LayerNorm output_norm{nullptr}; // output.LayerNorm

 private:
  // `asking` [B, Q, H] are the tokens whose context is wanted.
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
  /// Hidden states of the last block: [B, T, H], or [B, 1, H] of the first token
  /// alone, which is what pool() reads. Other arguments as in
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

/// A BERT with a classifier over the first token's pooled state.
class BertForSequenceClassificationImpl : public torch::nn::Module {
 public:
  /// Fresh weights from torch's default generator: normal(0, initializer_range)
  /// for matrices and embeddings, 0 for biases and the padding row, 1 and 0 for
  /// LayerNorm. hasten::set_seed makes them equal on all ranks.
  /// initialize = false leaves the weights undetermined, for who loads them all.
  /// Throws InputError as BertConfig::validate.
  explicit BertForSequenceClassificationImpl(BertConfig config, bool initialize = true);
  /// `input_ids` [B, T] int64 below vocab_size; `attention_mask` [B, T] int64 or
  /// bool, 1 for tokens and 0 for padding, undefined for all ones;
  /// `token_type_ids` [B, T] int64, undefined for all zeros.
  /// Returns logits [B, L].
  /// Throws InputError where T is above max_position_embeddings.
  at::Tensor forward(at::Tensor input_ids, at::Tensor attention_mask = {},
                     at::Tensor token_type_ids = {});
  /// Draws new weights for classifier (and pooler), as the constructor does.
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
