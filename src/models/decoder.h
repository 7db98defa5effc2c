// hasten's decoder families.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <vector>

#include "hasten/core/linear.h"
#include "hasten/models/model_family.h"

namespace hasten::detail {

/// The blocks whose tokens attend only to the last sliding_window tokens, unless config.json has
/// layer_types. Qwen's: those from max_window_layers on.
enum class AttentionWindows { none, every_layer, upper_layers, layers_without_rotary };

/// What distinguishes a decoder family from Llama: a row of decoder_families.cpp. Keys are those of
/// config.json.
struct DecoderTraits {
  /// Modules. Without `positions`, queries and keys are rotated by their positions (rotary).
  const char* words = "model.embed_tokens";
  const char* positions = nullptr;
  const char* layers = "model.layers";
  const char* norm = "model.norm";
  /// GPT-2's blocks, with LayerNorm, Conv1D and an MLP without a gate.
  bool gpt2_blocks = false;
  /// Biases of queries, keys and values; of attention's output; of the MLP. Empty: by the keys
  /// attention_bias and mlp_bias.
  std::optional<bool> query_bias{}, output_bias{}, mlp_bias{};
  /// Queries and keys have a norm for each head.
  bool head_norms = false;
  AttentionWindows windows = AttentionWindows::none;
  /// Blocks without rotary positions, by no_rope_layers or each no_rope_layer_interval-th.
  bool layers_without_rotary = false;
  /// Values of keys that a config.json does not have; 0: hidden_size / num_attention_heads, and
  /// num_attention_heads.
  int64_t head_dim = 0, num_key_value_heads = 0;
  double rope_theta = 10'000, embd_pdrop = 0;
  bool tie_word_embeddings = false;
};

/// The families of decoder_families.cpp.
std::vector<ModelFamily> decoder_families();

/// GPT-2's linear layer: its weight is [in, out].
class Conv1DImpl : public torch::nn::Module {
 public:
  Conv1DImpl(int64_t in, int64_t out)
      : weight_(register_parameter("weight", at::empty({in, out}))),
        bias_(register_parameter("bias", at::empty({out}))) {}
  at::Tensor forward(const at::Tensor& x, const Activation& activation = {});
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return bias_; }

 private:
  at::Tensor weight_, bias_;
};
TORCH_MODULE(Conv1D);

/// A decoder with a head for causal_lm or sequence_classification.
std::shared_ptr<PreTrainedModelImpl> make_decoder(const PreTrainedConfig& config, ModelTask task,
                                                  const DecoderTraits& traits);

} // namespace hasten::detail
