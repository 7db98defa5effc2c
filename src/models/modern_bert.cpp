// ModernBERT: rotary positions, blocks that attend globally or in a window, gated feed-forward,
// LayerNorm before each part.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "base/known_keys.h"
#include "core/dropout.h"
#include "encoder.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/core/autocast.h"
#include "hasten/core/block_call.h"
#include "rotary.h"

namespace hasten::detail {

struct ModernBertOptions {
  explicit ModernBertOptions(const PreTrainedConfig& config);

  std::vector<bool> local{}; // [block]
  int64_t window = 0; // tokens to each side
  RotaryOptions global{}, near{};
  double embedding_dropout = 0;
  bool norm_bias = false;
  bool attention_bias = false;
  bool mlp_bias = false;
};

[[noreturn]] static void throw_modern_bert(const std::string& what, const std::string& expected) {
  throw InputError("models::ModernBert", "config.json: " + what, expected);
}

ModernBertOptions::ModernBertOptions(const PreTrainedConfig& config) {
  const auto options = parse_json("models::ModernBert", "other_keys", config.other_keys);
  window = family_option<int64_t>(options, "local_attention", 128) / 2;
  const auto rotary = [&](const char* layers, const char* old_theta, double theta) {
    return RotaryOptions::of_layers(options, config.model_type, layers, old_theta,
                                    config.max_position_embeddings,
                                    config.hidden_size / config.num_attention_heads, theta);
  };
  global = rotary("full_attention", "global_rope_theta", 160'000);
  near = rotary("sliding_attention", "local_rope_theta", 10'000);
  embedding_dropout = family_option(options, "embedding_dropout", 0.0);
  norm_bias = family_option(options, "norm_bias", false);
  attention_bias = family_option(options, "attention_bias", false);
  mlp_bias = family_option(options, "mlp_bias", false);
  const auto types = family_option(options, "layer_types", std::vector<std::string>());
  const auto every = family_option<int64_t>(options, "global_attn_every_n_layers", 3);
  if (window < 1 || every < 1 || !(embedding_dropout >= 0 && embedding_dropout < 1)) {
    throw_modern_bert("local_attention=" + std::to_string(window * 2) +
                          ", global_attn_every_n_layers=" + std::to_string(every) +
                          ", embedding_dropout=" + std::to_string(embedding_dropout),
                      "2 or more, 1 or more, and from 0 to below 1");
  }
  if (std::ranges::count(types, "sliding_attention") +
          std::ranges::count(types, "full_attention") !=
      std::ssize(types)) {
    throw_modern_bert("layer_types=" + joined(types),
                      "\"sliding_attention\" or \"full_attention\"");
  }
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    local.push_back(i < std::ssize(types) ? types[static_cast<size_t>(i)] == "sliding_attention"
                                          : i % every != 0);
  }
}

class ModernBertLayerImpl : public torch::nn::Module {
 public:
  ModernBertLayerImpl(const PreTrainedConfig& config, const ModernBertOptions& options, bool first);
  /// `hidden` [B, T, H]. `mask` is undefined, or additive, [B or 1, 1, T or 1, T]. Returns [B, T,
  /// H]; with first_token_only [B, 1, H], without the other tokens' feed-forward.
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines, at::Tensor sines,
                     bool first_token_only);

 private:
  torch::nn::LayerNorm attn_norm_{nullptr}; // the first block reads normalised embeddings
  torch::nn::LayerNorm mlp_norm_{nullptr};
  torch::nn::Linear qkv_{nullptr}, attn_output_{nullptr}, wide_{nullptr}, output_{nullptr};
  int64_t heads_;
  bool eager_;
  double attention_dropout_;
  double mlp_dropout_;
  Activation activation_;
};
TORCH_MODULE(ModernBertLayer);

ModernBertLayerImpl::ModernBertLayerImpl(const PreTrainedConfig& config,
                                         const ModernBertOptions& options, bool first)
    : heads_(config.num_attention_heads),
      eager_(config.attn_implementation == "eager"),
      attention_dropout_(config.attention_probs_dropout_prob),
      mlp_dropout_(config.hidden_dropout_prob),
      activation_{config.activation(), true} {
  if (!first) {
    attn_norm_ = register_module("attn_norm", make_norm(config, options.norm_bias));
  }
  const int64_t width = config.hidden_size, wide = config.intermediate_size;
  const bool bias = options.attention_bias;
  qkv_ = registered(*this, "attn.Wqkv", make_linear(width, 3 * width, bias));
  attn_output_ = registered(*this, "attn.Wo", make_linear(width, width, bias));
  mlp_norm_ = register_module("mlp_norm", make_norm(config, options.norm_bias));
  wide_ = registered(*this, "mlp.Wi", make_linear(width, 2 * wide, options.mlp_bias));
  output_ = registered(*this, "mlp.Wo", make_linear(wide, width, options.mlp_bias));
}

at::Tensor ModernBertLayerImpl::forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines,
                                        at::Tensor sines, bool first_token_only) {
  const double p = is_training() ? attention_dropout_ : 0.0;
  const auto qkv =
      linear_of(qkv_, attn_norm_.is_empty() ? hidden : attn_norm_->forward(hidden)).chunk(3, -1);
  at::Tensor query = qkv[0];
  if (first_token_only) {
    query = query.narrow(1, 0, 1).contiguous();
    hidden = hidden.narrow(1, 0, 1).contiguous();
    mask = mask.defined() ? mask.narrow(2, 0, 1) : mask;
  }
  const int64_t asking = query.size(1);
  query = rotated(query, cosines.slice(0, 0, asking), sines.slice(0, 0, asking), heads_);
  const at::Tensor context = self_attention(query, rotated(qkv[1], cosines, sines, heads_), qkv[2],
                                            mask, heads_, p, eager_);
  hidden = dropout_add(linear_of(attn_output_, context), hidden, p);
  const at::Tensor wide = linear_of(wide_, mlp_norm_->forward(hidden));
  if (is_training() && mlp_dropout_ > 0) {
    return hidden + linear_of(output_, dropout_add(activation_(wide), {}, mlp_dropout_));
  }
  return hidden + linear_of(output_, wide, activation_);
}

class ModernBertEncoder : public TextEncoder {
 public:
  explicit ModernBertEncoder(const PreTrainedConfig& config);
  at::Tensor encode(const ModelInputs& inputs, bool first_token_only) override;
  const torch::nn::Embedding& words() const override { return words_; }
  double range_of(const std::string& name, double initializer_range) const override;

 private:
  ModernBertOptions options_;
  int64_t head_width_;
  torch::nn::Embedding words_;
  torch::nn::LayerNorm norm_;
  torch::nn::ModuleList layers_{};
  torch::nn::LayerNorm final_norm_;
};

ModernBertEncoder::ModernBertEncoder(const PreTrainedConfig& config)
    : options_(config),
      head_width_(config.hidden_size / config.num_attention_heads),
      words_(make_embedding(config.vocab_size, config.hidden_size, config.pad_token_id)),
      norm_(make_norm(config, options_.norm_bias)),
      final_norm_(make_norm(config, options_.norm_bias)) {
  if (head_width_ % 2 != 0) {
    throw_modern_bert("hidden_size / num_attention_heads=" + std::to_string(head_width_),
                      "an even width, whose halves are turned");
  }
  register_path(*this, "embeddings.tok_embeddings", words_.ptr());
  register_path(*this, "embeddings.norm", norm_.ptr());
  register_module("layers", layers_);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers_->push_back(ModernBertLayer(config, options_, i == 0));
  }
  register_module("final_norm", final_norm_);
}

at::Tensor ModernBertEncoder::encode(const ModelInputs& inputs, bool first_token_only) {
  const int64_t tokens = inputs.input_ids.size(1);
  at::Tensor hidden = dropout_add(norm_->forward(words_->forward(inputs.input_ids)), {},
                                  is_training() ? options_.embedding_dropout : 0.0);
  at::Tensor ignored = padding_of(inputs.attention_mask);
  at::Tensor masks[2]; // of global and local blocks
  if (ignored.defined()) {
    ignored = ignored.view({ignored.size(0), 1, 1, tokens});
    masks[0] = masks[1] = additive_mask(ignored, hidden);
  }
  if (tokens > options_.window + 1) {
    const at::Tensor at = at::arange(tokens, inputs.input_ids.options());
    const at::Tensor gap = (at.unsqueeze(0) - at.unsqueeze(1)).view({1, 1, tokens, tokens});
    const at::Tensor far = (gap > options_.window) | (gap < -options_.window);
    masks[1] = additive_mask(ignored.defined() ? far | ignored : far, hidden);
  }
  const at::Tensor positions = at::arange(tokens, inputs.input_ids.options());
  const RotaryTable tables[2] = {{options_.global, positions, head_width_, hidden},
                                 {options_.near, positions, head_width_, hidden}};
  for (size_t i = 0; i < layers_->size(); ++i) {
    const size_t local = options_.local[i] ? 1 : 0;
    hidden =
        call_block(layers_->at<ModernBertLayerImpl>(i), hidden, masks[local], tables[local].cosines,
                   tables[local].sines, first_token_only && i + 1 == layers_->size());
  }
  return final_norm_->forward(hidden);
}

// The projections at the end of a block's parts are drawn smaller, because the sum of all blocks'
// results should not grow with their number.
double ModernBertEncoder::range_of(const std::string& name, double initializer_range) const {
  if (name == "classifier.weight") {
    return 1 / std::sqrt(static_cast<double>(words_->weight.size(1)));
  }
  return name.ends_with("Wo.weight") || name == "head.dense.weight"
             ? initializer_range / std::sqrt(2.0 * static_cast<double>(layers_->size()))
             : initializer_range;
}

std::shared_ptr<TextEncoder> make_modern_bert_encoder(const PreTrainedConfig& config) {
  return std::make_shared<ModernBertEncoder>(config);
}

} // namespace hasten::detail
