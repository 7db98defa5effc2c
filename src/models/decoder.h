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

/// The blocks whose tokens attend only to the last sliding_window tokens. All but every_layer read
/// layer_types first. `pattern`: all but each sliding_window_pattern-th. The last two need
/// use_sliding_window, and are Qwen's, from max_window_layers on, and SmolLM3's.
enum class AttentionWindows { none, every_layer, pattern, upper_layers, layers_without_rotary };

/// What distinguishes a decoder family from Llama: a row of decoder_families.cpp. Keys are those of
/// config.json; values of those that a file does not have are in the family's defaults.
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
  /// Norms multiply by 1 + weight. Attention and MLP have a norm after them, too. Word embeddings are
  /// multiplied by sqrt(hidden_size).
  bool norms_add_one = false, sandwich_norms = false, scaled_embeddings = false;
  /// qkv_proj and gate_up_proj instead of three and two projections.
  bool fused_projections = false;
  AttentionWindows windows = AttentionWindows::none;
  /// Blocks without rotary positions, by no_rope_layers or each no_rope_layer_interval-th.
  bool layers_without_rotary = false;
  /// Blocks with a window have angles of their own, by rope_local_base_freq.
  bool local_rotary = false;
  bool scaled_queries = false; // by their positions (RotaryOptions::query_beta)
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

/// A decoder with a head for causal_lm, sequence_classification or token_classification.
std::shared_ptr<PreTrainedModelImpl> make_decoder(const PreTrainedConfig& config, ModelTask task,
                                                  const DecoderTraits& traits);

} // namespace hasten::detail
