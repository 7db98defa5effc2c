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
#include "lora_layer.h"
#include "rotary.h"

namespace hasten::detail {

/// The traits and config.json's options together.
struct DecoderOptions {
  DecoderOptions(const PreTrainedConfig& config, const DecoderTraits& traits);

  int64_t heads, key_value_heads, head_width, wide;
  bool tied, query_bias, output_bias, mlp_bias;
  double embedding_dropout;
  RotaryOptions rotary{}, local_rotary{}; // local: of blocks with a window
  std::vector<bool> rotated{}; // [block] has rotary positions
  std::vector<bool> windowed{}; // [block] attends to the last `window` tokens
  int64_t window = 0; // 0: all tokens
  double query_scale; // besides 1 / sqrt(head_width)
  double attention_softcap, output_softcap; // 0: none
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
  using enum AttentionWindows;
  const bool asked = traits.windows == upper_layers || traits.windows == layers_without_rotary;
  if (traits.windows != none && (!asked || family_option(options, "use_sliding_window", false))) {
    out.window = family_option<int64_t>(options, "sliding_window", 0);
    require_option(out.window >= 0, "sliding_window=" + std::to_string(out.window),
                   "a number of tokens, or null");
  }
  using Types = std::vector<std::string>;
  const bool typed = traits.windows != none && traits.windows != every_layer; // as its class
  const Types types = typed ? family_option(options, "layer_types", Types()) : Types();
  const auto upper = family_option<int64_t>(options, "max_window_layers", 0);
  const auto every = family_option<int64_t>(options, "sliding_window_pattern", interval);
  require_option(every > 0, "sliding_window_pattern=" + std::to_string(every), "1 or more");
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const auto block = static_cast<size_t>(i);
    const bool rotates = rotated.empty() ? (i + 1) % interval != 0 : rotated[block] != 0;
    const bool slides = !types.empty()                   ? types[block] == "sliding_attention"
                        : traits.windows == pattern      ? (i + 1) % every != 0
                        : traits.windows == upper_layers ? i >= upper
                        : traits.windows == layers_without_rotary ? !rotates
                                                                  : traits.windows != none;
    require_option(
        types.empty() || types[block] == "full_attention" || (slides && out.window > 0),
        "layer_types=" + joined(types) + ", sliding_window=" + std::to_string(out.window),
        std::string("\"full_attention\", or \"sliding_attention\" with ") +
            (asked ? "use_sliding_window and " : "") + "sliding_window");
    out.rotated.push_back(rotates);
    out.windowed.push_back(slides);
  }
}

// Sets how queries, keys, scores and logits are scaled.
static void take_scales(const PreTrainedConfig& config, const DecoderTraits& traits,
                        const nlohmann::json& options, DecoderOptions& out) {
  const auto width = static_cast<double>(out.head_width);
  const auto scalar = family_option(options, "query_pre_attn_scalar", width);
  out.query_scale = std::sqrt(width / scalar);
  out.attention_softcap = family_option(options, "attn_logit_softcapping", 0.0);
  out.output_softcap = family_option(options, "final_logit_softcapping", 0.0);
  require_option(scalar > 0 && out.attention_softcap >= 0 && out.output_softcap >= 0,
                 "query_pre_attn_scalar=" + std::to_string(scalar) +
                     ", attn_logit_softcapping=" + std::to_string(out.attention_softcap) +
                     ", final_logit_softcapping=" + std::to_string(out.output_softcap),
                 "positive numbers, or null for no softcapping");
  if (traits.positions != nullptr) {
    return;
  }
  if (!traits.local_rotary) {
    out.rotary = RotaryOptions::of(options, config.max_position_embeddings, out.head_width);
    const bool longrope = out.rotary.type == "longrope";
    require_option(!traits.fused_projections || longrope || out.rotary.type == "default",
                   "rope_type=" + out.rotary.type, "\"default\" or \"longrope\" in this family");
    require_option(!traits.scaled_queries || out.rotary.query_beta >= 0,
                   "rope_parameters without llama_4_scaling_beta", "a number of 0 or more");
    out.rotary.query_beta = traits.scaled_queries ? out.rotary.query_beta : -1;
    return;
  }
  const auto of_layers = [&](const char* layers, const char* old_theta) {
    return RotaryOptions::of_layers(options, config.model_type, layers, old_theta,
                                    config.max_position_embeddings, out.head_width);
  };
  out.rotary = of_layers("full_attention", "rope_theta");
  out.local_rotary = of_layers("sliding_attention", "rope_local_base_freq");
}

DecoderOptions::DecoderOptions(const PreTrainedConfig& config, const DecoderTraits& traits) {
  auto options = parse_json("models::Decoder", "other_keys",
                            model_family(config.model_type).defaults.other_keys);
  auto own = parse_json("models::Decoder", "other_keys", config.other_keys);
  for (const char* key :
       {"head_dim", "rope_parameters", "tie_word_embeddings"}) { // of other keys null is a value
    own.value(key, nlohmann::json()).is_null() ? own.erase(key) : size_t{0};
  }
  options.update(own);
  heads = config.num_attention_heads;
  key_value_heads = family_option(options, "num_key_value_heads", heads);
  head_width = family_option(options, "head_dim", config.hidden_size / heads);
  wide = family_option(
      options, "n_inner",
      traits.positions != nullptr ? 4 * config.hidden_size : config.intermediate_size);
  tied = family_option(options, "tie_word_embeddings", false);
  const bool bias = family_option(options, "attention_bias", false);
  query_bias = traits.query_bias.value_or(bias);
  output_bias = traits.output_bias.value_or(bias);
  mlp_bias = traits.mlp_bias.value_or(family_option(options, "mlp_bias", false));
  embedding_dropout = family_option(options, "embd_pdrop", 0.0);
  require_option(
      key_value_heads > 0 && heads % key_value_heads == 0 && head_width > 0 && wide > 0,
      "num_key_value_heads=" + std::to_string(key_value_heads) +
          ", head_dim=" + std::to_string(head_width) + ", n_inner=" + std::to_string(wide),
      "positive numbers, the first a divisor of num_attention_heads=" + std::to_string(heads));
  require_option(embedding_dropout >= 0 && embedding_dropout < 1,
                 "embd_pdrop=" + std::to_string(embedding_dropout), "from 0 to below 1");
  take_blocks(config, traits, options, *this);
  take_scales(config, traits, options, *this);
}

/// A block: `hidden` [B, T, H]; the same for the result. `cosines` and `sines` are undefined in
/// blocks that do not rotate queries and keys, `query_scale` in those that do not scale queries.
class DecoderBlockImpl : public torch::nn::Module {
 public:
  virtual at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines,
                             at::Tensor sines, at::Tensor query_scale, AttentionPlace place) = 0;
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
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor, at::Tensor, at::Tensor,
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

/// x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight), over the last dimension.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double eps, bool adds_one)
      : weight_(register_parameter("weight", at::empty({width}))), eps_(eps), adds_one_(adds_one) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::ScalarType wide = at::promote_types(weight_.scalar_type(), at::kFloat);
    return at::rms_norm(x, weight_.sizes(), adds_one_ ? weight_.to(wide) + 1 : weight_, eps_);
  }

 private:
  at::Tensor weight_;
  double eps_;
  bool adds_one_;
};
TORCH_MODULE(RmsNorm);

class LlamaBlockImpl : public DecoderBlockImpl {
 public:
  LlamaBlockImpl(const PreTrainedConfig& config, const DecoderTraits& traits,
                 const DecoderOptions& options);
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines, at::Tensor sines,
                     at::Tensor query_scale, AttentionPlace place) override;

 private:
  at::Tensor attend(const at::Tensor& read, const at::Tensor& mask, const at::Tensor& cosines,
                    const at::Tensor& sines, const at::Tensor& query_scale,
                    const AttentionPlace& place);

  RmsNorm norm_{nullptr}, mlp_norm_{nullptr};
  // Optional.
  RmsNorm query_norm_{nullptr}, key_norm_{nullptr}, attention_end_{nullptr}, mlp_end_{nullptr};
  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, qkv_{nullptr}; // three or one
  torch::nn::Linear attention_output_{nullptr};
  torch::nn::Linear gate_{nullptr}, up_{nullptr}, gate_up_{nullptr}, down_{nullptr};
  int64_t heads_, key_value_heads_;
  double attention_dropout_, dropout_, query_scale_, softcap_;
  Activation activation_;
};

LlamaBlockImpl::LlamaBlockImpl(const PreTrainedConfig& config, const DecoderTraits& traits,
                               const DecoderOptions& options)
    : heads_(options.heads),
      key_value_heads_(options.key_value_heads),
      attention_dropout_(config.attention_probs_dropout_prob),
      dropout_(config.hidden_dropout_prob),
      query_scale_(options.query_scale),
      softcap_(options.attention_softcap),
      activation_{config.activation(), /*gated=*/true} {
  const auto norm = [&](const char* path, int64_t width) {
    return registered(*this, path, RmsNorm(width, config.layer_norm_eps, traits.norms_add_one));
  };
  const auto linear = [&](const char* path, int64_t in, int64_t out, bool bias) {
    return registered(*this, path, make_linear(in, out, bias));
  };
  const int64_t hidden = config.hidden_size;
  const int64_t queries = options.heads * options.head_width;
  const int64_t keys = options.key_value_heads * options.head_width;
  norm_ = norm("input_layernorm", hidden);
  if (traits.fused_projections) {
    qkv_ = linear("self_attn.qkv_proj", hidden, queries + 2 * keys, options.query_bias);
    gate_up_ = linear("mlp.gate_up_proj", hidden, 2 * options.wide, options.mlp_bias);
  } else {
    query_ = linear("self_attn.q_proj", hidden, queries, options.query_bias);
    key_ = linear("self_attn.k_proj", hidden, keys, options.query_bias);
    value_ = linear("self_attn.v_proj", hidden, keys, options.query_bias);
    gate_ = linear("mlp.gate_proj", hidden, options.wide, options.mlp_bias);
    up_ = linear("mlp.up_proj", hidden, options.wide, options.mlp_bias);
  }
  attention_output_ = linear("self_attn.o_proj", queries, hidden, options.output_bias);
  down_ = linear("mlp.down_proj", options.wide, hidden, options.mlp_bias);
  if (traits.head_norms) {
    query_norm_ = norm("self_attn.q_norm", options.head_width);
    key_norm_ = norm("self_attn.k_norm", options.head_width);
  }
  if (traits.sandwich_norms) {
    attention_end_ = norm("post_attention_layernorm", hidden);
    mlp_norm_ = norm("pre_feedforward_layernorm", hidden);
    mlp_end_ = norm("post_feedforward_layernorm", hidden);
  } else {
    mlp_norm_ = norm("post_attention_layernorm", hidden);
  }
}

static at::Tensor normed(RmsNorm norm, const at::Tensor& x) {
  return norm.is_empty() ? x : norm->forward(x);
}

static at::Tensor normed_heads(RmsNorm norm, const at::Tensor& x, int64_t heads) {
  return norm.is_empty() ? x : norm->forward(x.view({x.size(0), x.size(1), heads, -1})).flatten(2);
}

at::Tensor LlamaBlockImpl::attend(const at::Tensor& read, const at::Tensor& mask,
                                  const at::Tensor& cosines, const at::Tensor& sines,
                                  const at::Tensor& query_scale, const AttentionPlace& place) {
  at::Tensor query, key, value;
  if (qkv_.is_empty()) {
    value = linear_of(value_, read);
    query = linear_of(query_, read);
    key = linear_of(key_, read);
  } else {
    const at::Tensor all = linear_of(qkv_, read);
    const int64_t keys = all.size(2) / (heads_ + 2 * key_value_heads_) * key_value_heads_;
    const auto parts = all.split_with_sizes({all.size(2) - 2 * keys, keys, keys}, 2);
    query = parts[0];
    key = parts[1];
    value = parts[2];
  }
  const auto placed = [&](const at::Tensor& product, const RmsNorm& norm, int64_t heads) {
    const at::Tensor x = normed_heads(norm, product, heads);
    return cosines.defined() ? rotated(x, cosines, sines, heads) : x;
  };
  query = placed(query, query_norm_, heads_);
  query = query_scale_ != 1 ? query * query_scale_ : query;
  query = query_scale.defined() ? query * query_scale : query;
  return decoder_attention(query.to(value.scalar_type()),
                           placed(key, key_norm_, key_value_heads_).to(value.scalar_type()), value,
                           mask,
                           {.heads = heads_,
                            .key_value_heads = key_value_heads_,
                            .dropout = is_training() ? attention_dropout_ : 0.0,
                            .softcap = softcap_},
                           place);
}

at::Tensor LlamaBlockImpl::forward(at::Tensor hidden, at::Tensor mask, at::Tensor cosines,
                                   at::Tensor sines, at::Tensor query_scale, AttentionPlace place) {
  const double p = is_training() ? dropout_ : 0.0;
  at::Tensor read = autocast_cast(norm_->forward(hidden)); // cast once for the products
  const at::Tensor context = attend(read, mask, cosines, sines, query_scale, place);
  hidden = dropout_add(normed(attention_end_, linear_of(attention_output_, context)), hidden, p);
  read = autocast_cast(mlp_norm_->forward(hidden));
  // One tensor, so that only it is kept for backward.
  const at::Tensor wide = gate_up_.is_empty()
                              ? at::cat({linear_of(gate_, read), linear_of(up_, read)}, -1)
                              : linear_of(gate_up_, read);
  return dropout_add(normed(mlp_end_, linear_of(down_, wide, activation_)), hidden, p);
}

class DecoderModel : public PreTrainedModelImpl {
 public:
  DecoderModel(const PreTrainedConfig& config, ModelTask task, const DecoderTraits& traits);
  at::Tensor logits(const ModelInputs& inputs) override;
  void init_weight(const std::string& name, const at::Tensor& weight) override;
  bool supports_cache() const override { return true; }
  int64_t cache_limit() const override {
    return options_.rotary.type == "longrope" ? static_cast<int64_t>(options_.rotary.context) : 0;
  }
  std::string output_layer() const override {
    const bool gpt2_tokens = traits_.gpt2_blocks && task() == ModelTask::token_classification;
    return task() == ModelTask::causal_lm ? "lm_head" : gpt2_tokens ? "classifier" : "score";
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
    return lora_mark(output_weight())
               ? PreTrainedModelImpl::next_token_loss(inputs, labels)
               : linear_cross_entropy(decode(inputs), output_weight(), labels, int64_t{128} << 20,
                                      options_.output_softcap);
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
                : torch::nn::AnyModule(
                      RmsNorm(config.hidden_size, config.layer_norm_eps, traits.norms_add_one))) {
  register_path(*this, traits.words, words_.ptr());
  if (traits.positions != nullptr) {
    positions_ = registered(*this, traits.positions,
                            make_embedding(config.max_position_embeddings, config.hidden_size));
  }
  register_path(*this, traits.layers, layers_.ptr());
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    traits.gpt2_blocks
        ? layers_->push_back(std::make_shared<Gpt2BlockImpl>(config, options_))
        : layers_->push_back(std::make_shared<LlamaBlockImpl>(config, traits, options_));
  }
  register_path(*this, traits.norm, norm_.ptr());
  if (task != ModelTask::causal_lm || !options_.tied) {
    const int64_t out = task == ModelTask::causal_lm ? config.vocab_size : config.num_labels();
    output_ =
        registered(*this, output_layer(),
                   make_linear(config.hidden_size, out, task == ModelTask::token_classification));
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
    const at::Tensor text = text_numbers(places).unsqueeze(1);
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
  if (traits_.scaled_embeddings) {
    hidden = hidden * std::sqrt(static_cast<double>(hidden.size(2)));
  }
  std::optional<RotaryTable> table, local_table;
  if (!positions_.is_empty()) {
    hidden = dropout_add(hidden + positions_->forward(positions), {},
                         is_training() ? options_.embedding_dropout : 0.0);
  } else {
    table.emplace(options_.rotary, positions, options_.head_width, hidden);
    if (traits_.local_rotary) {
      local_table.emplace(options_.local_rotary, positions, options_.head_width, hidden);
    }
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
    const auto& angles = local_table && options_.windowed[i] ? local_table : table;
    const bool rotates = angles && options_.rotated[i];
    hidden = call_block(
        layers_->at<DecoderBlockImpl>(i), hidden, options_.windowed[i] ? window_mask : mask,
        rotates ? angles->cosines : at::Tensor(), rotates ? angles->sines : at::Tensor(),
        rotates ? angles->query_scale : at::Tensor(), place);
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
  if (task() == ModelTask::token_classification) { // 0.1 is transformers' default
    x = dropout_add(x, {}, is_training() ? config().classifier_dropout.value_or(0.1) : 0.0);
    return linear_of(output_, x);
  }
  if (task() != ModelTask::causal_lm) {
    const at::Tensor last = last_tokens(inputs).view({-1, 1, 1}).expand({-1, 1, x.size(2)});
    return product_of({}, x.gather(1, last).squeeze(1), output_weight());
  }
  if (inputs.logits_to_keep > 0) {
    x = x.slice(1, -inputs.logits_to_keep);
  }
  return softcapped(product_of({}, x, output_weight()), options_.output_softcap);
}

// GPT-2's projections at the end of a block's parts are drawn smaller, because the sum of all blocks'
// results should not grow with their number.
void DecoderModel::init_weight(const std::string& name, const at::Tensor& weight) {
  PreTrainedModelImpl::init_weight(name, weight);
  if (name.ends_with("c_proj.weight")) {
    weight.div_(std::sqrt(2.0 * static_cast<double>(layers_->size())));
  } else if (weight.is_same(words_->weight) && words_->options.padding_idx()) {
    weight[*words_->options.padding_idx()].zero_();
  } else if (traits_.norms_add_one && name.ends_with("norm.weight")) {
    weight.zero_();
  }
}

std::shared_ptr<PreTrainedModelImpl> make_decoder(const PreTrainedConfig& config, ModelTask task,
                                                  const DecoderTraits& traits) {
  return std::make_shared<DecoderModel>(config, task, traits);
}

} // namespace hasten::detail
