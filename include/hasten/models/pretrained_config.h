// config.json of a Hugging Face model folder: what models of all families have in common.
// Threading: values.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hasten {

/// What a model computes, as transformers' classes AutoModelFor… have it.
enum class ModelTask {
  /// One vector of logits for a sample.
  sequence_classification,
  /// Logits of the labels for each token.
  token_classification,
  /// Logits of the vocabulary for each token.
  masked_lm,
  /// Logits of the vocabulary for each token's next one.
  causal_lm,
};
/// "SequenceClassification", "TokenClassification", "MaskedLM", "CausalLM".
std::string_view task_name(ModelTask task);

/// A configuration. The fields have BERT's names and the defaults of bert-base-uncased. A family
/// may have other names and defaults in its config.json (ModelFamily::attribute_map).
struct PreTrainedConfig {
  std::string model_type = "bert";
  int64_t vocab_size = 30522;
  int64_t hidden_size = 768;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t intermediate_size = 3072;
  int64_t max_position_embeddings = 512;
  int64_t type_vocab_size = 2;
  /// This row of the word embeddings starts at 0 and gets no gradient, except in GPT-2. -1: none,
  /// for decoders.
  int64_t pad_token_id = 0;
  /// "gelu" (exact), "gelu_new" (tanh), "relu" or "silu", or another of transformers' names for these.
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
  /// "regression", "single_label_classification" or "multi_label_classification"; empty if the file
  /// has no problem_type.
  std::string problem_type{};
  /// Classes of the saved model: "BertForSequenceClassification".
  std::vector<std::string> architectures{};
  /// dtype of the weights in files: "float32", "bfloat16", "float16".
  std::string dtype = "float32";
  /// Attention in training, as transformers names it. "eager": torch's plain operators, which keep the
  /// scores for backward, T^2 elements for each head, and can be differentiated any number of times. The
  /// others use kernels that can be differentiated once. "sdpa": decoders compute the scores again in
  /// slices, on a CPU in fp32 or bf16. "auto": sdpa from 256 tokens on, where it takes less time, too.
  /// Not in the file.
  std::string attn_implementation = "auto";
  /// All other keys of the file, as the text of a JSON object. A family reads its own options from
  /// them. to_json() writes them unchanged.
  std::string other_keys = "{}";

  int64_t num_labels() const { return static_cast<int64_t>(id2label.size()); }
  /// Largest number of tokens of an input: max_position_embeddings, without the rows that
  /// RoBERTa's position embeddings have for padding.
  int64_t max_tokens() const;
  /// hidden_act by the first of its names: "gelu_new" for "gelu_pytorch_tanh".
  std::string activation() const;
  /// Whether `architectures` has a model of this task, so that its folder has such a head.
  bool has_head(ModelTask task) const;

  /// Reads config.json. Messages use `source` as the file's name. Throws InputError with key and
  /// value for an unknown model_type (the message lists the known ones), a value out of range, an
  /// option that the family does not support, or gaps in id2label. Logs keys that transformers does
  /// not have either.
  static PreTrainedConfig from_json(const nlohmann::json& json,
                                    std::string_view source = "config.json");
  /// config.json for transformers: with architectures, model_type, id2label, label2id and
  /// other_keys.
  nlohmann::json to_json() const;
  /// Throws InputError with the first value that is out of range.
  void validate(std::string_view source = "PreTrainedConfig") const;
};

/// Makes configurations, like transformers' AutoConfig.
struct AutoConfig {
  /// Reads config.json of a folder or of a repository in Hugging Face's cache, before any weight is
  /// read. Throws InputError as PreTrainedConfig::from_json and pretrained_folder do, and if the
  /// folder has no such file.
  static PreTrainedConfig from_pretrained(const std::string& folder);
  /// The defaults of a family. Throws InputError for a model_type that no family has.
  static PreTrainedConfig for_model(std::string_view model_type);
  /// Configuration of a named shape: "bert-tiny" (2 layers, hidden_size 128), "bert-mini" (4, 256),
  /// "bert-small" (4, 512), "bert-base" (12, 768). Decoders: "gpt2-mini" (6, 384), "gpt2-small" (12,
  /// 768: that of the hub's gpt2), "llama-mini" (6, 384), "llama-small" (12, 768). Heads have size 64;
  /// intermediate_size is 4 · hidden_size, for Llama 8 / 3. Throws InputError for another name; the message lists these.
  static PreTrainedConfig from_shape(std::string_view shape, int64_t vocab_size = 30522);
  /// Whether `name` is the name of a shape.
  static bool is_shape(std::string_view name);
  /// All names: "bert-tiny, bert-mini, …".
  static std::string shapes_text();
};

} // namespace hasten
