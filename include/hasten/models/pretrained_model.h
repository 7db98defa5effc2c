// A model with a head, of any family: named inputs, {loss, logits}, a Hugging Face folder.
// auto_model.h makes them. model_family.h adds families.
// Shapes: B samples, T tokens, H hidden_size, L num_labels, V vocab_size.
// Threading: one thread per model, as for torch::nn::Module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/models/linear_cross_entropy.h"
#include "hasten/models/pretrained_config.h"

namespace hasten {

class KeyValueCache;

struct ModelInputs {
  /// [B, T] int64, below vocab_size.
  at::Tensor input_ids{};
  /// [B, T] int64 or bool: 1 for tokens, 0 for padding. Undefined means all 1. With past_key_values
  /// also of the tokens that the cache has: [B, length + T].
  at::Tensor attention_mask{};
  /// [B, T] int64. Undefined means all 0. Families without token types ignore it.
  at::Tensor token_type_ids{};
  /// Sequence classification: [B] classes, or numbers ([B] or [B, L]) for a regression, or [B, L] of
  /// 0 and 1 for several labels. The other tasks: [B, T] classes; -100 has no loss. causal_lm compares
  /// each token's logits with the next token's label, so labels are input_ids.
  at::Tensor labels{};
  /// Decoders: the place of each token in its text, [B, T] int64. Undefined: 0, 1, … after the tokens
  /// that the cache has. Without a cache a row may have several texts, as in transformers: where a place
  /// is not that of the token before + 1, another text begins. Tokens attend to their own text alone.
  at::Tensor position_ids{};
  /// Decoders with supports_cache(): the tokens before input_ids, to which these are added
  /// (key_value_cache.h). Call without gradients.
  std::shared_ptr<KeyValueCache> past_key_values{};
  /// Decoders: logits of only the last tokens, as many as this; 0: of all.
  int64_t logits_to_keep = 0;
};

struct ModelOutput {
  /// The mean over the labels; undefined without labels.
  at::Tensor loss{};
  /// [B, L], or [B, T, L], or [B, T, V].
  at::Tensor logits{};
};

/// What from_pretrained() found in a folder.
struct LoadingInfo {
  /// Parameters that the folder does not have. They have new, random weights.
  std::vector<std::string> missing_keys{};
  /// Tensors of the folder that this model does not use, such as the heads of other tasks.
  std::vector<std::string> unexpected_keys{};
  /// Whether the last layer of the head (output_layer) is new.
  bool new_output = false;
  /// Sentences for the user ("the classifier is new, with random weights: …"). Nothing is logged.
  std::vector<std::string> report{};
};

/// Names of a weight that two layers share: in files of some programs both are there.
struct TiedWeight {
  /// The output layer's, which this model does not have: "lm_head.weight". Empty: nothing is shared.
  std::string output{};
  /// The word embeddings', which it uses instead: "model.embed_tokens.weight".
  std::string embeddings{};
};

/// The base of all models. A family derives from it and implements logits(). It calls its repeated
/// blocks, which it has in a torch::nn::ModuleList, through hasten::call_block. Its parameters have
/// the names of transformers.
class PreTrainedModelImpl : public torch::nn::Module {
 public:
  /// Throws InputError as PreTrainedConfig::validate does.
  PreTrainedModelImpl(PreTrainedConfig config, ModelTask task);

  /// The loss is transformers' for the task. For sequence classification problem_type decides; if it
  /// is empty, one label is a regression, labels of an integer type are classes, and others are
  /// several labels for each sample.
  /// Throws InputError if T is above max_tokens().
  ModelOutput forward(const ModelInputs& inputs);

  /// The loss of causal_lm, summed over the labels: token t of `token_losses` [B, T] has that of
  /// predicting token t + 1. Decoders compute it by linear_cross_entropy(), so the logits [B, T, V] are
  /// never in memory; a family without that computes it from logits().
  /// Throws InputError as forward() does, for another task, and without labels.
  LinearCrossEntropy causal_loss(const ModelInputs& inputs);

  /// The head's result for the inputs; it does not read the labels.
  virtual at::Tensor logits(const ModelInputs& inputs) = 0;
  /// Whether a row may have several texts (ModelInputs::position_ids). An exported model answers by
  /// computing the logits of a few tokens.
  virtual bool supports_packing() { return true; }
  /// Whether logits() reads and fills past_key_values.
  virtual bool supports_cache() const { return false; }
  /// With more tokens a text's keys and values are other ones (the long factors of Phi-3), so that generate()
  /// computes those in the cache again. 0: never.
  virtual int64_t cache_limit() const { return 0; }
  /// Draws new values for a parameter, without gradient: normal(0, initializer_range) for matrices,
  /// 0 for biases, 1 for other vectors. Draws from torch's default generator.
  virtual void init_weight(const std::string& name, const at::Tensor& weight);
  /// Writes what a folder has in addition to configuration and weights: the graph of an exported model.
  virtual void save_program(const std::filesystem::path& /*folder*/) const {}
  /// Name of the module with the head's last projection, whose rows are the labels.
  virtual std::string output_layer() const { return "classifier"; }

  /// Draws all parameters, in named_parameters() order. After hasten::set_seed they are equal on all
  /// ranks.
  void init_weights();
  /// Writes config.json, model.safetensors and, if the model was loaded with one, generation_config.json
  /// into an existing folder. To replace a whole model
  /// folder atomically, pass FolderCommit::folder(), add the other files and commit. Local: call it
  /// on one rank. Throws Error with path and reason.
  void save_pretrained(const std::filesystem::path& folder) const;
  /// As the functions of gradient_checkpointing.h.
  void gradient_checkpointing_enable(const GradientCheckpointingOptions& options = {});
  void gradient_checkpointing_disable();

  const PreTrainedConfig& config() const { return config_; }
  ModelTask task() const { return task_; }
  /// The repeated blocks, in order: the units of checkpointing and of sharding.
  std::vector<std::shared_ptr<torch::nn::Module>> blocks() const;
  /// The weight that the output layer takes from the word embeddings.
  virtual TiedWeight tied_weight() const { return {}; }
  /// Gives the output layer a copy of that weight, as tie_word_embeddings=false. Does nothing if it has
  /// one. Call it before prepare(). Throws InputError if the family has no such layer.
  void untie_weights();
  const LoadingInfo& loading_info() const { return loading_info_; }
  void set_loading_info(LoadingInfo info) { loading_info_ = std::move(info); }
  /// Text of generation_config.json, for save_pretrained(). Empty: none.
  void set_generation_config(std::string text) { generation_config_ = std::move(text); }

 protected:
  /// Registers an output layer and returns its weight, which no other layer has. Undefined: the family
  /// has none.
  virtual at::Tensor make_output_weight() { return {}; }
  /// causal_loss() for `labels` [B, T] of each token's next one.
  virtual LinearCrossEntropy next_token_loss(const ModelInputs& inputs, const at::Tensor& labels);
  /// The same of logits [B, T, V].
  static LinearCrossEntropy loss_of_tokens(const at::Tensor& logits, const at::Tensor& labels);

 private:
  void check_inputs(const ModelInputs& inputs) const;
  at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& labels) const;

  PreTrainedConfig config_;
  ModelTask task_;
  LoadingInfo loading_info_{};
  std::string generation_config_{};
};
TORCH_MODULE(PreTrainedModel);

} // namespace hasten
