// Decoders: GPT-2, Llama, Qwen2 and Qwen3. Each token attends to those before it.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "decoder.h"
#include "dropout.h"
#include "encoder.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/core/autocast.h"
#include "hasten/core/block_call.h"
#include "rotary.h"

namespace hasten::detail {

/// Options of config.json that PreTrainedConfig has no field for.
struct DecoderOptions {
  DecoderOptions(const PreTrainedConfig& config, DecoderFamily family);

  int64_t heads, key_value_heads, head_width, wide;
  bool tied, attention_bias, output_bias, mlp_bias;
  bool head_norms; // of queries and keys
  double embedding_dropout;
  RotaryOptions rotary{};
};

static void require_option(bool right, const std::string& what, const std::string& expected) {
  if (!right) {
    throw InputError("models::Decoder", "config.json: " + what, expected);
  }
}

DecoderOptions::DecoderOptions(const PreTrainedConfig& config, DecoderFamily family) {
  const auto options = parse_json("models::Decoder", "other_keys", config.other_keys);
  const bool gpt2 = family == DecoderFamily::gpt2;
  heads = config.num_attention_heads;
  key_value_heads = gpt2 ? heads : family_option(options, "num_key_value_heads", heads);
  head_width = family_option(options, "head_dim",
                             family == DecoderFamily::qwen3 ? 128 : config.hidden_size / heads);
  wide =
      gpt2 ? family_option(options, "n_inner", 4 * config.hidden_size) : config.intermediate_size;
  tied = family_option(options, "tie_word_embeddings", gpt2);
  const bool bias = family_option(options, "attention_bias", false);
  attention_bias = family == DecoderFamily::qwen2 || bias;
  output_bias = family != DecoderFamily::qwen2 && bias;
  mlp_bias = family == DecoderFamily::llama && family_option(options, "mlp_bias", false);
  head_norms = family == DecoderFamily::qwen3;
  embedding_dropout = gpt2 ? family_option(options, "embd_pdrop", 0.1) : 0.0;
  require_option(
      key_value_heads > 0 && heads % key_value_heads == 0 && head_width > 0 && wide > 0,
      "num_key_value_heads=" + std::to_string(key_value_heads) +
          ", head_dim=" + std::to_string(head_width) + ", n_inner=" + std::to_string(wide),
      "positive numbers, the first a divisor of num_attention_heads=" + std::to_string(heads));
  require_option(embedding_dropout >= 0 && embedding_dropout < 1,
                 "embd_pdrop=" + std::to_string(embedding_dropout), "from 0 to below 1");
  const auto types = family_option(options, "layer_types", std::vector<std::string>());
  require_option(std::ranges::count(types, "full_attention") == std::ssize(types),
                 "layer_types=" + joined(types), "\"full_attention\" for each layer");
  if (!gpt2) {
    require_option(head_width % 2 == 0, "head_dim=" + std::to_string(head_width),
                   "an even width, whose halves are turned");
    rotary = RotaryOptions::of(options, config.max_position_embeddings);
  }
}

at::Tensor Conv1DImpl::forward(const at::Tensor& x, const Activation& activation) {
  return product_of(activation, x, weight_.t(), bias_, &weight_);
}

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  Gpt2BlockImpl(const PreTrainedConfig& config, const DecoderOptions& options)
      : norm_(registered(*this, "ln_1", make_norm(config))),
        qkv_(registered(*this, "attn.c_attn", Conv1D(config.hidden_size, 3 * config.hidden_size))),
        attention_output_(
            registered(*this, "attn.c_proj", Conv1D(config.hidden_size, config.hidden_size))),
        mlp_norm_(registered(*this, "ln_2", make_norm(config))),
        wide_(registered(*this, "mlp.c_fc", Conv1D(config.hidden_size, options.wide))),
        output_(registered(*this, "mlp.c_proj", Conv1D(options.wide, config.hidden_size))),
        heads_(options.heads),
        attention_dropout_(config.attention_probs_dropout_prob),
        dropout_(config.hidden_dropout_prob),
        activation_{config.activation()} {}
  /// `hidden` [B, T, H]; the same for the result.
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor, at::Tensor,
                     AttentionPlace place) {
    const double p = is_training() ? dropout_ : 0.0;
    const auto qkv = qkv_->forward(norm_->forward(hidden)).chunk(3, -1);
    const at::Tensor context =
        decoder_attention(qkv[0], qkv[1], qkv[2], mask,
                          {.heads = heads_,
                           .key_value_heads = heads_,
                           .dropout = is_training() ? attention_dropout_ : 0.0},
                          place);
    hidden = dropout_add(attention_output_->forward(context), hidden, p);
    const at::Tensor wide = wide_->forward(mlp_norm_->forward(hidden));
    return dropout_add(output_->forward(wide, activation_), hidden, p);
  }

 private:
  torch::nn::LayerNorm norm_;
  Conv1D qkv_, attention_output_;
  torch::nn::LayerNorm mlp_norm_;
  Conv1D wide_, output_;
  int64_t heads_;
  double attention_dropout_, dropout_;
  Activation activation_;
};
TORCH_MODULE(Gpt2Block);

/// x / sqrt(mean(x^2) + eps) * weight, over the last dimension.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double eps)
      : weight_(register_parameter("weight", at::empty({width}))), eps_(eps) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::rms_norm(x, weight_.sizes(), weight_, eps_);
  }

 private:
  at::Tensor weight_;
  double eps_;
};
TORCH_MODULE(RmsNorm);

class LlamaBlockImpl : public torch::nn::Module {
 public:
  LlamaBlockImpl(const PreTrainedConfig& config, const DecoderOptions& options);
  /// `hidden` [B, T, H]; the same for the result.
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines, at::Tensor sines,
                     AttentionPlace place);

 private:
  RmsNorm norm_{nullptr}, mlp_norm_{nullptr};
  RmsNorm query_norm_{nullptr}, key_norm_{nullptr}; // Qwen3's
  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, attention_output_{nullptr};
  torch::nn::Linear gate_{nullptr}, up_{nullptr}, down_{nullptr};
  int64_t heads_, key_value_heads_;
  double attention_dropout_;
  Activation activation_;
};
TORCH_MODULE(LlamaBlock);

LlamaBlockImpl::LlamaBlockImpl(const PreTrainedConfig& config, const DecoderOptions& options)
    : heads_(options.heads),
      key_value_heads_(options.key_value_heads),
      attention_dropout_(config.attention_probs_dropout_prob),
      activation_{config.activation(), /*gated=*/true} {
  const auto norm = [&](const char* path, int64_t width) {
    return registered(*this, path, RmsNorm(width, config.layer_norm_eps));
  };
  const auto linear = [&](const char* path, int64_t in, int64_t out, bool bias) {
    return registered(*this, path, make_linear(in, out, bias));
  };
  const int64_t hidden = config.hidden_size;
  const int64_t queries = options.heads * options.head_width;
  const int64_t keys = options.key_value_heads * options.head_width;
  norm_ = norm("input_layernorm", hidden);
  query_ = linear("self_attn.q_proj", hidden, queries, options.attention_bias);
  key_ = linear("self_attn.k_proj", hidden, keys, options.attention_bias);
  value_ = linear("self_attn.v_proj", hidden, keys, options.attention_bias);
  attention_output_ = linear("self_attn.o_proj", queries, hidden, options.output_bias);
  if (options.head_norms) {
    query_norm_ = norm("self_attn.q_norm", options.head_width);
    key_norm_ = norm("self_attn.k_norm", options.head_width);
  }
  mlp_norm_ = norm("post_attention_layernorm", hidden);
  gate_ = linear("mlp.gate_proj", hidden, options.wide, options.mlp_bias);
  up_ = linear("mlp.up_proj", hidden, options.wide, options.mlp_bias);
  down_ = linear("mlp.down_proj", options.wide, hidden, options.mlp_bias);
}

static at::Tensor normed_heads(RmsNorm norm, const at::Tensor& x, int64_t heads) {
  return norm.is_empty() ? x : norm->forward(x.view({x.size(0), x.size(1), heads, -1})).flatten(2);
}

at::Tensor LlamaBlockImpl::forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines,
                                   at::Tensor sines, AttentionPlace place) {
  at::Tensor read = autocast_cast(norm_->forward(hidden)); // cast once for three products
  const at::Tensor value = linear_of(value_, read);
  const at::Tensor query =
      rotated(normed_heads(query_norm_, linear_of(query_, read), heads_), cosines, sines, heads_)
          .to(value.scalar_type());
  const at::Tensor key = rotated(normed_heads(key_norm_, linear_of(key_, read), key_value_heads_),
                                 cosines, sines, key_value_heads_)
                             .to(value.scalar_type());
  const at::Tensor context =
      decoder_attention(query, key, value, mask,
                        {.heads = heads_,
                         .key_value_heads = key_value_heads_,
                         .dropout = is_training() ? attention_dropout_ : 0.0},
                        place);
  hidden = hidden + linear_of(attention_output_, context);
  read = autocast_cast(mlp_norm_->forward(hidden));
  // One tensor, so that only it is kept for backward.
  const at::Tensor wide = at::cat({linear_of(gate_, read), linear_of(up_, read)}, -1);
  return hidden + linear_of(down_, wide, activation_);
}

class DecoderModel : public PreTrainedModelImpl {
 public:
  DecoderModel(const PreTrainedConfig& config, ModelTask task, DecoderFamily family);
  at::Tensor logits(const ModelInputs& inputs) override;
  void init_weight(const std::string& name, const at::Tensor& weight) override;
  bool supports_cache() const override { return true; }
  std::string output_layer() const override {
    return task() == ModelTask::causal_lm ? "lm_head" : "score";
  }
  TiedWeight tied_weight() const override {
    return output_.is_empty() ? TiedWeight{"lm_head.weight", gpt2_ ? "transformer.wte.weight"
                                                                   : "model.embed_tokens.weight"}
                              : TiedWeight{};
  }

 protected:
  at::Tensor make_output_weight() override {
    output_ = registered(*this, output_layer(),
                         make_linear(config().hidden_size, config().vocab_size, false));
    return output_->weight;
  }
  LinearCrossEntropy next_token_loss(const ModelInputs& inputs, const at::Tensor& labels) override {
    return linear_cross_entropy(decode(inputs), output_weight(), labels);
  }

 private:
  const at::Tensor& output_weight() const {
    return output_.is_empty() ? words_->weight : output_->weight;
  }
  at::Tensor decode(const ModelInputs& inputs);
  at::Tensor last_tokens(const ModelInputs& inputs) const;

  DecoderOptions options_;
  bool gpt2_;
  torch::nn::Embedding words_;
  torch::nn::Embedding positions_{nullptr};
  torch::nn::ModuleList layers_{};
  torch::nn::LayerNorm layer_norm_{nullptr};
  RmsNorm rms_norm_{nullptr};
  torch::nn::Linear output_{nullptr}; // none if it is the word embeddings
};

static std::optional<int64_t> padding_row(const PreTrainedConfig& config, bool gpt2) {
  return gpt2 || config.pad_token_id < 0 ? std::nullopt : std::optional(config.pad_token_id);
}

DecoderModel::DecoderModel(const PreTrainedConfig& config, ModelTask task, DecoderFamily family)
    : PreTrainedModelImpl(config, task),
      options_(config, family),
      gpt2_(family == DecoderFamily::gpt2),
      words_(make_embedding(config.vocab_size, config.hidden_size, padding_row(config, gpt2_))) {
  register_path(*this, gpt2_ ? "transformer.wte" : "model.embed_tokens", words_.ptr());
  if (gpt2_) {
    positions_ = registered(*this, "transformer.wpe",
                            make_embedding(config.max_position_embeddings, config.hidden_size));
  }
  register_path(*this, gpt2_ ? "transformer.h" : "model.layers", layers_.ptr());
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    gpt2_ ? layers_->push_back(Gpt2Block(config, options_))
          : layers_->push_back(LlamaBlock(config, options_));
  }
  if (gpt2_) {
    layer_norm_ = registered(*this, "transformer.ln_f", make_norm(config));
  } else {
    rms_norm_ = registered(*this, "model.norm", RmsNorm(config.hidden_size, config.layer_norm_eps));
  }
  if (task != ModelTask::causal_lm || !options_.tied) {
    const int64_t out = task == ModelTask::causal_lm ? config.vocab_size : config.num_labels();
    output_ = registered(*this, output_layer(), make_linear(config.hidden_size, out, false));
  }
}

/// True where a token may not attend to another: [B or 1, 1, T or 1, past + T]; undefined: nowhere.
/// `later`: tokens after it are among them.
static at::Tensor ignored_tokens(const ModelInputs& inputs, int64_t past, bool later) {
  const int64_t tokens = inputs.input_ids.size(1);
  at::Tensor ignored;
  const auto add = [&](const at::Tensor& more) {
    ignored = ignored.defined() ? ignored | more : more;
  };
  if (later && tokens > 1) {
    add(at::ones({1, 1, tokens, past + tokens}, inputs.input_ids.options().dtype(at::kBool))
            .triu(past + 1));
  }
  if (const at::Tensor& places = inputs.position_ids; places.defined() && !inputs.past_key_values) {
    const at::Tensor steps = places.slice(1, 1) - places.slice(1, 0, -1);
    const at::Tensor text = at::constant_pad_nd(steps.ne(1), {1, 0}).cumsum(1).unsqueeze(1);
    add(text.unsqueeze(2).ne(text.unsqueeze(3)));
  }
  if (const at::Tensor padding = padding_of(inputs.attention_mask); padding.defined()) {
    add(padding.view({padding.size(0), 1, 1, past + tokens}));
  }
  return ignored;
}

at::Tensor DecoderModel::decode(const ModelInputs& inputs) {
  const int64_t past = inputs.past_key_values ? inputs.past_key_values->length() : 0;
  const int64_t tokens = inputs.input_ids.size(1);
  const at::Tensor positions = inputs.position_ids.defined()
                                   ? inputs.position_ids
                                   : at::arange(past, past + tokens, inputs.input_ids.options());
  at::Tensor hidden = words_->forward(inputs.input_ids);
  at::Tensor cosines, sines;
  if (gpt2_) {
    hidden = dropout_add(hidden + positions_->forward(positions), {},
                         is_training() ? options_.embedding_dropout : 0.0);
  } else {
    const RotaryTable table(options_.rotary, positions, options_.head_width, hidden);
    cosines = table.cosines;
    sines = table.sines;
  }
  const bool sliced = !inputs.past_key_values && slices_attention(config(), tokens, hidden);
  const at::Tensor ignored = ignored_tokens(inputs, past, !sliced);
  const at::Tensor mask = ignored.defined() ? additive_mask(ignored, hidden) : at::Tensor();
  for (size_t i = 0; i < layers_->size(); ++i) {
    const AttentionPlace place{inputs.past_key_values.get(), i, sliced,
                               config().attn_implementation == "eager"};
    hidden = gpt2_
                 ? call_block(layers_->at<Gpt2BlockImpl>(i), hidden, mask, cosines, sines, place)
                 : call_block(layers_->at<LlamaBlockImpl>(i), hidden, mask, cosines, sines, place);
  }
  return gpt2_ ? layer_norm_->forward(hidden) : rms_norm_->forward(hidden);
}

// transformers': the last token that is not padding, by its id; without a padding id, by the mask.
at::Tensor DecoderModel::last_tokens(const ModelInputs& inputs) const {
  const at::Tensor& ids = inputs.input_ids;
  at::Tensor text = at::ones_like(ids);
  if (config().pad_token_id >= 0) {
    text = (ids != config().pad_token_id).to(at::kLong);
  } else if (inputs.attention_mask.defined()) {
    text = (inputs.attention_mask != 0).to(at::kLong);
  }
  return (text * at::arange(ids.size(1), ids.options())).argmax(1);
}

at::Tensor DecoderModel::logits(const ModelInputs& inputs) {
  at::Tensor x = decode(inputs);
  if (task() != ModelTask::causal_lm) {
    const at::Tensor last = last_tokens(inputs).view({-1, 1, 1}).expand({-1, 1, x.size(2)});
    x = x.gather(1, last).squeeze(1);
  } else if (inputs.logits_to_keep > 0) {
    x = x.slice(1, -inputs.logits_to_keep);
  }
  return product_of({}, x, output_weight());
}

// GPT-2's projections at the end of a block's parts are drawn smaller, because the sum of all blocks'
// results should not grow with their number.
void DecoderModel::init_weight(const std::string& name, const at::Tensor& weight) {
  PreTrainedModelImpl::init_weight(name, weight);
  if (name.ends_with("c_proj.weight")) {
    weight.div_(std::sqrt(2.0 * static_cast<double>(layers_->size())));
  } else if (weight.is_same(words_->weight) && words_->options.padding_idx()) {
    weight[*words_->options.padding_idx()].zero_();
  }
}

std::shared_ptr<PreTrainedModelImpl> make_decoder(const PreTrainedConfig& config, ModelTask task,
                                                  DecoderFamily family) {
  return std::make_shared<DecoderModel>(config, task, family);
}

} // namespace hasten::detail
