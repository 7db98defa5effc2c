// Decoders. Each token attends to those before it. decoder_families.cpp has the families.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>

#include "attention.h"
#include "core/dropout.h"
#include "decoder.h"
#include "encoder.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/core/autocast.h"
#include "hasten/core/block_call.h"
#include "rotary.h"

namespace hasten::detail {

/// The traits and config.json's options together.
struct DecoderOptions {
  DecoderOptions(const PreTrainedConfig& config, const DecoderTraits& traits);

  int64_t heads, key_value_heads, head_width, wide;
  bool tied, query_bias, output_bias, mlp_bias, head_norms;
  double embedding_dropout;
  RotaryOptions rotary{};
  std::vector<bool> rotated{}; // [block] has rotary positions
  std::vector<bool> windowed{}; // [block] attends to the last `window` tokens
  int64_t window = 0; // 0: none
};

static void require_option(bool right, const std::string& what, const std::string& expected) {
  if (!right) {
    throw InputError("models::Decoder", "config.json: " + what, expected);
  }
}

/// Sets which blocks rotate queries and keys, and which attend to a window of the last tokens.
static void take_blocks(const PreTrainedConfig& config, const DecoderTraits& traits,
                        const nlohmann::json& options, DecoderOptions& out) {
  std::vector<int64_t> rotated; // empty: all but each interval-th
  int64_t interval = config.num_hidden_layers + 1;
  if (traits.layers_without_rotary) {
    rotated = family_option(options, "no_rope_layers", rotated);
    interval = family_option<int64_t>(options, "no_rope_layer_interval", 4);
    require_option(
        interval > 0 && (rotated.empty() || std::ssize(rotated) >= config.num_hidden_layers),
        "no_rope_layers has " + std::to_string(rotated.size()) +
            " numbers, no_rope_layer_interval=" + std::to_string(interval),
        "a number for each of num_hidden_layers=" + std::to_string(config.num_hidden_layers) +
            ", and an interval above 0");
  }
  const bool all = traits.windows == AttentionWindows::every_layer;
  const bool by_rotary = traits.windows == AttentionWindows::layers_without_rotary;
  const bool by_type = !all && traits.windows != AttentionWindows::none; // as transformers' classes
  if (all || (by_type && family_option(options, "use_sliding_window", false))) {
    const bool null = options.contains("sliding_window"); // or a number
    out.window = family_option<int64_t>(options, "sliding_window", null ? 0 : 4096);
    require_option(out.window >= 0, "sliding_window=" + std::to_string(out.window),
                   "a number of tokens, or null");
  }
  using Types = std::vector<std::string>;
  const Types types = by_type ? family_option(options, "layer_types", Types()) : Types();
  const auto upper = family_option<int64_t>(options, "max_window_layers", 28);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const auto block = static_cast<size_t>(i);
    const bool rotates = rotated.empty() ? (i + 1) % interval != 0 : rotated[block] != 0;
    const bool slides = types.empty() ? all || (by_rotary ? !rotates : i >= upper)
                                      : types[block] == "sliding_attention";
    require_option(
        types.empty() || types[block] == "full_attention" || (slides && out.window > 0),
        "layer_types=" + joined(types) + ", sliding_window=" + std::to_string(out.window),
        "\"full_attention\", or \"sliding_attention\" with use_sliding_window and sliding_window");
    out.rotated.push_back(rotates);
    out.windowed.push_back(slides && out.window > 0);
  }
}

DecoderOptions::DecoderOptions(const PreTrainedConfig& config, const DecoderTraits& traits)
    : head_norms(traits.head_norms) {
  const auto options = parse_json("models::Decoder", "other_keys", config.other_keys);
  heads = config.num_attention_heads;
  const bool as_heads = traits.num_key_value_heads == 0 || options.contains("num_key_value_heads");
  key_value_heads =
      family_option(options, "num_key_value_heads", as_heads ? heads : traits.num_key_value_heads);
  head_width = family_option(options, "head_dim",
                             traits.head_dim > 0 ? traits.head_dim : config.hidden_size / heads);
  wide = family_option(
      options, "n_inner",
      traits.positions != nullptr ? 4 * config.hidden_size : config.intermediate_size);
  tied = family_option(options, "tie_word_embeddings", traits.tie_word_embeddings);
  const bool bias = family_option(options, "attention_bias", false);
  query_bias = traits.query_bias.value_or(bias);
  output_bias = traits.output_bias.value_or(bias);
  mlp_bias = traits.mlp_bias.value_or(family_option(options, "mlp_bias", false));
  embedding_dropout = family_option(options, "embd_pdrop", traits.embd_pdrop);
  require_option(
      key_value_heads > 0 && heads % key_value_heads == 0 && head_width > 0 && wide > 0,
      "num_key_value_heads=" + std::to_string(key_value_heads) +
          ", head_dim=" + std::to_string(head_width) + ", n_inner=" + std::to_string(wide),
      "positive numbers, the first a divisor of num_attention_heads=" + std::to_string(heads));
  require_option(embedding_dropout >= 0 && embedding_dropout < 1,
                 "embd_pdrop=" + std::to_string(embedding_dropout), "from 0 to below 1");
  take_blocks(config, traits, options, *this);
  if (traits.positions == nullptr) {
    require_option(head_width % 2 == 0, "head_dim=" + std::to_string(head_width),
                   "an even width, whose halves are rotated");
    rotary = RotaryOptions::of(options, config.max_position_embeddings, traits.rope_theta);
  }
}

/// A block: `hidden` [B, T, H]; the same for the result. `cosines` and `sines` are undefined in
/// blocks that do not rotate queries and keys.
class DecoderBlockImpl : public torch::nn::Module {
 public:
  virtual at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines,
                             at::Tensor sines, AttentionPlace place) = 0;
};

at::Tensor Conv1DImpl::forward(const at::Tensor& x, const Activation& activation) {
  return product_of(activation, x, weight_.t(), bias_, &weight_);
}

class Gpt2BlockImpl : public DecoderBlockImpl {
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
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor, at::Tensor,
                     AttentionPlace place) override {
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

class LlamaBlockImpl : public DecoderBlockImpl {
 public:
  LlamaBlockImpl(const PreTrainedConfig& config, const DecoderOptions& options);
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines, at::Tensor sines,
                     AttentionPlace place) override;

 private:
  RmsNorm norm_{nullptr}, mlp_norm_{nullptr};
  RmsNorm query_norm_{nullptr}, key_norm_{nullptr}; // optional
  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, attention_output_{nullptr};
  torch::nn::Linear gate_{nullptr}, up_{nullptr}, down_{nullptr};
  int64_t heads_, key_value_heads_;
  double attention_dropout_;
  Activation activation_;
};

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
  query_ = linear("self_attn.q_proj", hidden, queries, options.query_bias);
  key_ = linear("self_attn.k_proj", hidden, keys, options.query_bias);
  value_ = linear("self_attn.v_proj", hidden, keys, options.query_bias);
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
  const auto placed = [&](const torch::nn::Linear& linear, const RmsNorm& norm, int64_t heads) {
    const at::Tensor x = normed_heads(norm, linear_of(linear, read), heads);
    return (cosines.defined() ? rotated(x, cosines, sines, heads) : x).to(value.scalar_type());
  };
  const at::Tensor query = placed(query_, query_norm_, heads_);
  const at::Tensor key = placed(key_, key_norm_, key_value_heads_);
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
  DecoderModel(const PreTrainedConfig& config, ModelTask task, const DecoderTraits& traits);
  at::Tensor logits(const ModelInputs& inputs) override;
  void init_weight(const std::string& name, const at::Tensor& weight) override;
  bool supports_cache() const override { return true; }
  std::string output_layer() const override {
    return task() == ModelTask::causal_lm ? "lm_head" : "score";
  }
  TiedWeight tied_weight() const override {
    return output_.is_empty() ? TiedWeight{"lm_head.weight", std::string(traits_.words) + ".weight"}
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

  DecoderTraits traits_;
  DecoderOptions options_;
  torch::nn::Embedding words_;
  torch::nn::Embedding positions_{nullptr}; // none with rotary positions
  torch::nn::ModuleList layers_{};
  torch::nn::AnyModule norm_{};
  torch::nn::Linear output_{nullptr}; // none if it is the word embeddings
};

DecoderModel::DecoderModel(const PreTrainedConfig& config, ModelTask task,
                           const DecoderTraits& traits)
    : PreTrainedModelImpl(config, task),
      traits_(traits),
      options_(config, traits),
      words_(make_embedding(config.vocab_size, config.hidden_size,
                            traits.positions != nullptr || config.pad_token_id < 0
                                ? std::nullopt
                                : std::optional(config.pad_token_id))),
      norm_(traits.gpt2_blocks
                ? torch::nn::AnyModule(make_norm(config))
                : torch::nn::AnyModule(RmsNorm(config.hidden_size, config.layer_norm_eps))) {
  register_path(*this, traits.words, words_.ptr());
  if (traits.positions != nullptr) {
    positions_ = registered(*this, traits.positions,
                            make_embedding(config.max_position_embeddings, config.hidden_size));
  }
  register_path(*this, traits.layers, layers_.ptr());
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    traits.gpt2_blocks ? layers_->push_back(std::make_shared<Gpt2BlockImpl>(config, options_))
                       : layers_->push_back(std::make_shared<LlamaBlockImpl>(config, options_));
  }
  register_path(*this, traits.norm, norm_.ptr());
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
  const int64_t tokens = inputs.input_ids.size(1), window = options_.window;
  const at::Tensor positions = inputs.position_ids.defined()
                                   ? inputs.position_ids
                                   : at::arange(past, past + tokens, inputs.input_ids.options());
  at::Tensor hidden = words_->forward(inputs.input_ids);
  at::Tensor cosines, sines;
  if (!positions_.is_empty()) {
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
  at::Tensor window_mask = mask;
  if (window > 0 && past + tokens > window) {
    const at::Tensor far =
        at::ones({1, 1, tokens, past + tokens}, inputs.input_ids.options().dtype(at::kBool))
            .tril(past - window);
    window_mask = additive_mask(ignored.defined() ? far | ignored : far, hidden);
  }
  for (size_t i = 0; i < layers_->size(); ++i) {
    const AttentionPlace place{inputs.past_key_values.get(), i, sliced,
                               config().attn_implementation == "eager"};
    hidden = call_block(layers_->at<DecoderBlockImpl>(i), hidden,
                        options_.windowed[i] ? window_mask : mask,
                        options_.rotated[i] ? cosines : at::Tensor(),
                        options_.rotated[i] ? sines : at::Tensor(), place);
  }
  return norm_.forward(hidden);
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
                                                  const DecoderTraits& traits) {
  return std::make_shared<DecoderModel>(config, task, traits);
}

} // namespace hasten::detail
