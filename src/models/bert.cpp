#include "hasten/models/bert.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <limits>

#include "attention.h"
#include "dropout.h"
#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/core/block_call.h"
#include "hasten/core/linear.h"

namespace hasten {

namespace detail {

// A Linear with uninitialised weights; they are drawn as BERT's, or loaded. The dummy's two
// elements keep torch from initialising the real ones.
torch::nn::Linear make_bert_linear(int64_t in, int64_t out) {
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1));
  linear->options.in_features(in).out_features(out);
  linear->weight.set_data(at::empty({out, in}));
  linear->bias.set_data(at::empty({out}));
  return linear;
}

torch::nn::Embedding make_bert_embedding(int64_t rows, int64_t width,
                                         std::optional<int64_t> padding = {}) {
  auto options = torch::nn::EmbeddingOptions(rows, width);
  options._weight(at::empty({rows, width}));
  options.padding_idx(padding);
  return torch::nn::Embedding(options);
}

torch::nn::LayerNorm make_bert_norm(const BertConfig& config) {
  return torch::nn::LayerNorm(
      torch::nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_eps));
}

void draw_bert_linear(torch::nn::LinearImpl& linear, double range) {
  const at::NoGradGuard no_grad;
  linear.weight.normal_(0, range);
  linear.bias.zero_();
}

at::Tensor bert_linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return fast_linear(x, layer->weight, layer->bias);
}

void draw_bert_weights(torch::nn::Module& module, double range) {
  const at::NoGradGuard no_grad;
  for (const auto& child : module.modules()) {
    if (auto* linear = child->as<torch::nn::LinearImpl>()) {
      draw_bert_linear(*linear, range);
    } else if (auto* embedding = child->as<torch::nn::EmbeddingImpl>()) {
      embedding->weight.normal_(0, range);
      if (const auto& padding = embedding->options.padding_idx()) {
        embedding->weight[*padding].zero_();
      }
    }
  }
}

} // namespace detail

BertLayerImpl::BertLayerImpl(const BertConfig& config)
    : query(detail::make_bert_linear(config.hidden_size, config.hidden_size)),
      key(detail::make_bert_linear(config.hidden_size, config.hidden_size)),
      value(detail::make_bert_linear(config.hidden_size, config.hidden_size)),
      attention_output(detail::make_bert_linear(config.hidden_size, config.hidden_size)),
      attention_norm(detail::make_bert_norm(config)),
      intermediate(detail::make_bert_linear(config.hidden_size, config.intermediate_size)),
      output(detail::make_bert_linear(config.intermediate_size, config.hidden_size)),
      output_norm(detail::make_bert_norm(config)),
      heads_(config.num_attention_heads),
      hidden_dropout_(config.hidden_dropout_prob),
      attention_dropout_(config.attention_probs_dropout_prob),
      activation_(config.hidden_act) {
  using torch::nn::Module;
  // Modules of the state dict, in its order.
  auto attention = register_module("attention", std::make_shared<Module>());
  auto self = attention->register_module("self", std::make_shared<Module>());
  self->register_module("query", query);
  self->register_module("key", key);
  self->register_module("value", value);
  auto after = attention->register_module("output", std::make_shared<Module>());
  after->register_module("dense", attention_output);
  after->register_module("LayerNorm", attention_norm);
  register_module("intermediate", std::make_shared<Module>())
      ->register_module("dense", intermediate);
  auto last = register_module("output", std::make_shared<Module>());
  last->register_module("dense", output);
  last->register_module("LayerNorm", output_norm);
}

at::Tensor BertLayerImpl::attend(const at::Tensor& asking, const at::Tensor& hidden,
                                 const at::Tensor& mask) {
  const at::Tensor read = autocast_cast(hidden); // cast once for query, key and value
  return detail::self_attention(detail::bert_linear(query, asking.is_same(hidden) ? read : asking),
                                detail::bert_linear(key, read), detail::bert_linear(value, read),
                                mask, heads_, is_training() ? attention_dropout_ : 0.0);
}

at::Tensor BertLayerImpl::forward(at::Tensor hidden, at::Tensor mask, bool first_token_only) {
  const double p = is_training() ? hidden_dropout_ : 0.0;
  const at::Tensor asking = first_token_only ? hidden.narrow(1, 0, 1).contiguous() : hidden;
  const at::Tensor context = detail::bert_linear(attention_output, attend(asking, hidden, mask));
  hidden = attention_norm->forward(detail::dropout_add(context, asking, p));
  at::Tensor wide = detail::bert_linear(intermediate, hidden);
  if (activation_ == "relu") {
    wide = at::relu(wide);
  } else {
    wide = at::gelu(wide, activation_ == "gelu" ? "none" : "tanh");
  }
  return output_norm->forward(detail::dropout_add(detail::bert_linear(output, wide), hidden, p));
}

BertModelImpl::BertModelImpl(const BertConfig& config)
    : word_embeddings(
          detail::make_bert_embedding(config.vocab_size, config.hidden_size, config.pad_token_id)),
      position_embeddings(
          detail::make_bert_embedding(config.max_position_embeddings, config.hidden_size)),
      token_type_embeddings(
          detail::make_bert_embedding(config.type_vocab_size, config.hidden_size)),
      embedding_norm(detail::make_bert_norm(config)),
      pooler(detail::make_bert_linear(config.hidden_size, config.hidden_size)),
      hidden_dropout_(config.hidden_dropout_prob) {
  using torch::nn::Module;
  auto embeddings = register_module("embeddings", std::make_shared<Module>());
  embeddings->register_module("word_embeddings", word_embeddings);
  embeddings->register_module("position_embeddings", position_embeddings);
  embeddings->register_module("token_type_embeddings", token_type_embeddings);
  embeddings->register_module("LayerNorm", embedding_norm);
  auto encoder = register_module("encoder", std::make_shared<Module>());
  auto list = encoder->register_module("layer", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers.emplace_back(config);
    list->push_back(layers.back());
  }
  register_module("pooler", std::make_shared<Module>())->register_module("dense", pooler);
}

at::Tensor BertModelImpl::embed(const at::Tensor& input_ids, const at::Tensor& types) {
  const int64_t tokens = input_ids.size(1);
  const int64_t limit = position_embeddings->options.num_embeddings();
  if (tokens > limit) {
    throw InputError("models::BertModel", "tokens of a sample=" + std::to_string(tokens),
                     "at most max_position_embeddings=" + std::to_string(limit),
                     "truncate the texts (max_length)");
  }
  const at::Tensor words = word_embeddings->forward(input_ids);
  // Positions are the rows from 0, and texts without pairs have only one type: neither needs a
  // lookup.
  const at::Tensor positions = position_embeddings->weight.slice(0, 0, tokens);
  const at::Tensor sum = types.defined()
                             ? words + token_type_embeddings->forward(types) + positions
                             : words + (positions + token_type_embeddings->weight.select(0, 0));
  return detail::dropout_add(embedding_norm->forward(sum), {},
                             is_training() ? hidden_dropout_ : 0.0);
}

at::Tensor BertModelImpl::forward(at::Tensor input_ids, at::Tensor attention_mask,
                                  at::Tensor token_type_ids, bool first_token_only) {
  at::Tensor hidden = embed(input_ids, token_type_ids);
  at::Tensor mask;
  if (attention_mask.defined()) {
    const at::Tensor padding = attention_mask == 0;
    // Reading the result from a GPU would synchronise, so there the mask stays.
    if (!padding.is_cpu() || padding.any().item<bool>()) {
      // In the dtype of the products, for which attention has kernels; else each block converts it.
      const at::ScalarType dtype =
          padding.is_cpu() ? hidden.scalar_type()
                           : autocast_dtype(padding.device().type()).value_or(hidden.scalar_type());
      const float lowest = dtype == at::kHalf ? -65504.0f
                           : dtype == at::kBFloat16
                               ? static_cast<float>(std::numeric_limits<c10::BFloat16>::lowest())
                               : std::numeric_limits<float>::lowest();
      mask = (padding * lowest).to(dtype).view({padding.size(0), 1, 1, padding.size(1)});
    }
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool last = i + 1 == layers.size();
    hidden = call_block(layers[i], hidden, mask, first_token_only && last);
  }
  return hidden;
}

at::Tensor BertModelImpl::pool(const at::Tensor& hidden) {
  return at::tanh(detail::bert_linear(pooler, hidden.select(1, 0)));
}

BertForSequenceClassificationImpl::BertForSequenceClassificationImpl(BertConfig config,
                                                                     bool initialize)
    : config_(std::move(config)) {
  config_.validate();
  bert = register_module("bert", BertModel(config_));
  classifier = register_module("classifier",
                               detail::make_bert_linear(config_.hidden_size, config_.num_labels()));
  if (initialize) {
    detail::draw_bert_weights(*bert, config_.initializer_range);
    reset_classifier();
  }
}

at::Tensor BertForSequenceClassificationImpl::forward(at::Tensor input_ids,
                                                      at::Tensor attention_mask,
                                                      at::Tensor token_type_ids) {
  // The classifier reads only the first token, so the last block computes no other. This saves a
  // sixth to a quarter of the work of shallow models. The logits are the same.
  const at::Tensor hidden = bert->forward(std::move(input_ids), std::move(attention_mask),
                                          std::move(token_type_ids), true);
  const double p =
      is_training() ? config_.classifier_dropout.value_or(config_.hidden_dropout_prob) : 0.0;
  return classifier->forward(detail::dropout_add(bert->pool(hidden), {}, p));
}

void BertForSequenceClassificationImpl::reset_classifier() {
  detail::draw_bert_linear(*classifier, config_.initializer_range);
}

void BertForSequenceClassificationImpl::reset_pooler() {
  detail::draw_bert_linear(*bert->pooler, config_.initializer_range);
}

} // namespace hasten
