#include "encoder.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <limits>

#include "attention.h"
#include "core/dropout.h"
#include "few_rows.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/core/autocast.h"
#include "hasten/core/block_call.h"
#include "lora_layer.h"

namespace hasten::detail {

// The dummy's two elements keep torch from initialising the real weights.
torch::nn::Linear make_linear(int64_t in, int64_t out, bool bias) {
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(bias));
  linear->options.in_features(in).out_features(out);
  linear->weight.set_data(at::empty({out, in}));
  if (bias) {
    linear->bias.set_data(at::empty({out}));
  }
  return linear;
}

torch::nn::Embedding make_embedding(int64_t rows, int64_t width, std::optional<int64_t> padding) {
  auto options = torch::nn::EmbeddingOptions(rows, width);
  options._weight(at::empty({rows, width}));
  options.padding_idx(padding);
  return torch::nn::Embedding(options);
}

// torch's has both weight and bias, or neither.
class NormWithoutBias : public torch::nn::LayerNormImpl {
 public:
  explicit NormWithoutBias(const torch::nn::LayerNormOptions& options) : LayerNormImpl(options) {
    parameters_.erase("bias");
    bias = at::Tensor();
  }
};

torch::nn::LayerNorm make_norm(const PreTrainedConfig& config, bool bias) {
  const auto options = torch::nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_eps);
  std::shared_ptr<torch::nn::LayerNormImpl> without_bias;
  if (!bias) {
    without_bias = std::make_shared<NormWithoutBias>(options);
  }
  return bias ? torch::nn::LayerNorm(options) : torch::nn::LayerNorm(without_bias);
}

at::Tensor linear_of(const torch::nn::Linear& layer, const at::Tensor& x,
                     const Activation& activation) {
  return product_of(activation, x, layer->weight, layer->bias);
}

at::Tensor product_of(const Activation& activation, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, const at::Tensor* parameter) {
  if (const auto mark = lora_mark(parameter != nullptr ? *parameter : weight)) {
    const at::Tensor read = activation(x); // kept once, for both products
    const BaseProducts alone;
    const at::Tensor product = takes_few_rows(read, weight) ? few_rows_linear(read, weight, bias)
                                                            : fast_linear(read, weight, bias);
    return with_adapter(*mark, read, product, bias);
  }
  return takes_few_rows(x, weight) ? few_rows_linear(activation(x), weight, bias)
                                   : fast_linear(activation, x, weight, bias);
}

// The module at all but the last part of a path, and that part.
static std::pair<torch::nn::Module*, std::string> end_of_path(torch::nn::Module& root,
                                                              const std::string& path) {
  torch::nn::Module* at = &root;
  auto parts = split(path, ".");
  const std::string last = parts.back();
  parts.pop_back();
  for (const std::string& part : parts) {
    const auto children = at->named_children();
    const auto* found = children.find(part);
    at = found != nullptr ? found->get()
                          : at->register_module(part, std::make_shared<torch::nn::Module>()).get();
  }
  return {at, last};
}

void register_path(torch::nn::Module& root, const std::string& path,
                   std::shared_ptr<torch::nn::Module> module) {
  const auto [parent, name] = end_of_path(root, path);
  parent->register_module(name, std::move(module));
}

void register_path(torch::nn::Module& root, const std::string& path, const at::Tensor& parameter) {
  const auto [parent, name] = end_of_path(root, path);
  parent->register_parameter(name, parameter);
}

at::Tensor padding_of(const at::Tensor& attention_mask) {
  if (!attention_mask.defined()) {
    return {};
  }
  at::Tensor padding = attention_mask == 0;
  // Reading the result from a GPU would synchronise, so there the mask stays.
  return !padding.is_cpu() || padding.any().item<bool>() ? padding : at::Tensor();
}

at::Tensor additive_mask(const at::Tensor& ignored, const at::Tensor& hidden) {
  // In the dtype of the products, for which attention has kernels; else each block converts it.
  const at::ScalarType dtype =
      ignored.is_cpu() ? hidden.scalar_type()
                       : autocast_dtype(ignored.device().type()).value_or(hidden.scalar_type());
  const float lowest = dtype == at::kHalf ? -65504.0f
                       : dtype == at::kBFloat16
                           ? static_cast<float>(std::numeric_limits<c10::BFloat16>::lowest())
                           : std::numeric_limits<float>::lowest();
  return (ignored * lowest).to(dtype);
}

/// One block: self-attention and feed-forward, each followed by residual and LayerNorm.
class EncoderLayerImpl : public torch::nn::Module {
 public:
  EncoderLayerImpl(const PreTrainedConfig& config, const EncoderNames& names);
  /// `hidden` [B, T, H]. `mask` is undefined if no token is padding, else [B, 1, 1, T], additive.
  /// Returns [B, T, H]. With first_token_only it returns [B, 1, H] and skips the other tokens'
  /// queries and feed-forward (5/6 of a block's products).
  at::Tensor forward(at::Tensor hidden, at::Tensor mask, bool first_token_only);

 private:
  at::Tensor attend(const at::Tensor& asking, const at::Tensor& hidden, const at::Tensor& mask);

  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, attention_output_{nullptr};
  torch::nn::Linear intermediate_{nullptr}, output_{nullptr};
  torch::nn::LayerNorm attention_norm_{nullptr}, output_norm_{nullptr};
  int64_t heads_;
  bool eager_;
  double hidden_dropout_;
  double attention_dropout_;
  Activation activation_;
};
TORCH_MODULE(EncoderLayer);

EncoderLayerImpl::EncoderLayerImpl(const PreTrainedConfig& config, const EncoderNames& names)
    : heads_(config.num_attention_heads),
      eager_(config.attn_implementation == "eager"),
      hidden_dropout_(config.hidden_dropout_prob),
      attention_dropout_(config.attention_probs_dropout_prob),
      activation_{config.activation()} {
  const int64_t width = config.hidden_size, wide = config.intermediate_size;
  query_ = registered(*this, names.query, make_linear(width, width));
  key_ = registered(*this, names.key, make_linear(width, width));
  value_ = registered(*this, names.value, make_linear(width, width));
  attention_output_ = registered(*this, names.attention_output, make_linear(width, width));
  attention_norm_ = registered(*this, names.attention_norm, make_norm(config));
  intermediate_ = registered(*this, names.intermediate, make_linear(width, wide));
  output_ = registered(*this, names.output, make_linear(wide, width));
  output_norm_ = registered(*this, names.output_norm, make_norm(config));
}

at::Tensor EncoderLayerImpl::attend(const at::Tensor& asking, const at::Tensor& hidden,
                                    const at::Tensor& mask) {
  const at::Tensor read = autocast_cast(hidden); // cast once for query, key and value
  return self_attention(linear_of(query_, asking.is_same(hidden) ? read : asking),
                        linear_of(key_, read), linear_of(value_, read), mask, heads_,
                        is_training() ? attention_dropout_ : 0.0, eager_);
}

at::Tensor EncoderLayerImpl::forward(at::Tensor hidden, at::Tensor mask, bool first_token_only) {
  const double p = is_training() ? hidden_dropout_ : 0.0;
  const at::Tensor asking = first_token_only ? hidden.narrow(1, 0, 1).contiguous() : hidden;
  const at::Tensor context = linear_of(attention_output_, attend(asking, hidden, mask));
  hidden = attention_norm_->forward(dropout_add(context, asking, p));
  const at::Tensor wide = linear_of(intermediate_, hidden);
  return output_norm_->forward(dropout_add(linear_of(output_, wide, activation_), hidden, p));
}

class BertEncoder : public TextEncoder {
 public:
  BertEncoder(const PreTrainedConfig& config, const EncoderNames& names);
  at::Tensor encode(const ModelInputs& inputs, bool first_token_only) override;
  const torch::nn::Embedding& words() const override { return words_; }

 private:
  at::Tensor embed(const at::Tensor& ids, const at::Tensor& types);
  at::Tensor positions_of(const at::Tensor& ids);

  torch::nn::Embedding words_, positions_;
  torch::nn::Embedding types_{nullptr}, task_types_{nullptr};
  torch::nn::LayerNorm norm_;
  torch::nn::ModuleList layers_{};
  std::optional<int64_t> padding_{}; // the last position before those of tokens
  double dropout_;
};

BertEncoder::BertEncoder(const PreTrainedConfig& config, const EncoderNames& names)
    : words_(make_embedding(config.vocab_size, config.hidden_size, config.pad_token_id)),
      positions_(make_embedding(
          config.max_position_embeddings, config.hidden_size,
          names.positions_after_padding ? std::optional(config.pad_token_id) : std::nullopt)),
      norm_(make_norm(config)),
      padding_(positions_->options.padding_idx()),
      dropout_(config.hidden_dropout_prob) {
  register_path(*this, "embeddings.word_embeddings", words_.ptr());
  register_path(*this, "embeddings.position_embeddings", positions_.ptr());
  if (config.type_vocab_size > 0) {
    types_ = registered(*this, "embeddings.token_type_embeddings",
                        make_embedding(config.type_vocab_size, config.hidden_size));
  }
  const auto options = parse_json("models::BertEncoder", "other_keys", config.other_keys);
  const auto task_types = family_option<int64_t>(options, "task_type_vocab_size", 3);
  if (family_option(options, "use_task_id", false)) { // ERNIE's
    task_types_ = registered(*this, "embeddings.task_type_embeddings",
                             make_embedding(task_types, config.hidden_size));
  }
  register_path(*this, "embeddings.LayerNorm", norm_.ptr());
  register_path(*this, names.layers, layers_.ptr());
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers_->push_back(EncoderLayer(config, names));
  }
}

/// Positions are consecutive rows, which need no lookup. RoBERTa's padding has row padding_.
at::Tensor BertEncoder::positions_of(const at::Tensor& ids) {
  const int64_t first = padding_.value_or(-1) + 1;
  if (padding_) {
    const at::Tensor is_token = ids != *padding_;
    if (!ids.is_cpu() || !is_token.all().item<bool>()) {
      const at::Tensor counts = is_token.to(at::kLong);
      return positions_->forward(counts.cumsum(1) * counts + *padding_);
    }
  }
  return positions_->weight.slice(0, first, first + ids.size(1));
}

at::Tensor BertEncoder::embed(const at::Tensor& ids, const at::Tensor& types) {
  const at::Tensor words = words_->forward(ids);
  at::Tensor positions = positions_of(ids);
  if (!task_types_.is_empty()) { // 0, as transformers' where nobody passes task_type_ids
    positions = positions + task_types_->weight.select(0, 0);
  }
  // Texts without pairs have only one type: it needs no lookup.
  const at::Tensor sum = types_.is_empty() ? words + positions
                         : types.defined() ? words + types_->forward(types) + positions
                                           : words + (positions + types_->weight.select(0, 0));
  return dropout_add(norm_->forward(sum), {}, is_training() ? dropout_ : 0.0);
}

at::Tensor BertEncoder::encode(const ModelInputs& inputs, bool first_token_only) {
  at::Tensor hidden = embed(inputs.input_ids, inputs.token_type_ids);
  at::Tensor mask = padding_of(inputs.attention_mask);
  if (mask.defined()) {
    mask = additive_mask(mask, hidden).view({mask.size(0), 1, 1, mask.size(1)});
  }
  for (size_t i = 0; i < layers_->size(); ++i) {
    hidden = call_block(layers_->at<EncoderLayerImpl>(i), hidden, mask,
                        first_token_only && i + 1 == layers_->size());
  }
  return hidden;
}

std::shared_ptr<TextEncoder> make_bert_encoder(const PreTrainedConfig& config,
                                               const EncoderNames& names) {
  return std::make_shared<BertEncoder>(config, names);
}

/// An encoder with a head.
class EncoderModel : public PreTrainedModelImpl {
 public:
  EncoderModel(const PreTrainedConfig& config, ModelTask task, const std::string& base,
               std::shared_ptr<TextEncoder> encoder, HeadSpec head);
  at::Tensor logits(const ModelInputs& inputs) override;
  void init_weight(const std::string& name, const at::Tensor& weight) override;
  std::string output_layer() const override { return head_.output; }
  TiedWeight tied_weight() const override {
    return task() == ModelTask::masked_lm ? TiedWeight{head_.tied, words_} : TiedWeight{};
  }

 private:
  std::shared_ptr<TextEncoder> encoder_;
  HeadSpec head_;
  std::string words_{}; // parameter of the word embeddings
  torch::nn::Linear dense_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear output_{nullptr};
  at::Tensor decoder_bias_{};
};

EncoderModel::EncoderModel(const PreTrainedConfig& config, ModelTask task, const std::string& base,
                           std::shared_ptr<TextEncoder> encoder, HeadSpec head)
    : PreTrainedModelImpl(config, task), encoder_(std::move(encoder)), head_(std::move(head)) {
  register_module(base, encoder_);
  for (const auto& parameter : encoder_->named_parameters()) {
    if (parameter.value().is_same(encoder_->words()->weight)) {
      words_ = base + "." + parameter.key();
    }
  }
  if (!head_.dense.empty()) {
    dense_ = registered(*this, head_.dense,
                        make_linear(config.hidden_size, config.hidden_size, head_.dense_bias));
  }
  if (!head_.norm.empty()) {
    norm_ = registered(*this, head_.norm, make_norm(config, head_.norm_bias));
  }
  if (task != ModelTask::masked_lm) {
    output_ = registered(*this, head_.output, make_linear(config.hidden_size, config.num_labels()));
  } else if (!head_.output.empty()) {
    decoder_bias_ = at::empty({config.vocab_size});
    decoder_bias_.requires_grad_();
    register_path(*this, head_.output, decoder_bias_);
  }
}

at::Tensor EncoderModel::logits(const ModelInputs& inputs) {
  const bool pools = task() == ModelTask::sequence_classification;
  // A classifier that reads only the first token needs no other of the last block. This saves a
  // sixth to a quarter of the work of shallow models. The logits are the same.
  at::Tensor x = encoder_->encode(inputs, pools && !head_.mean_pooling);
  if (pools && !head_.mean_pooling) {
    x = x.select(1, 0);
  } else if (pools) {
    const at::Tensor mask = inputs.attention_mask;
    x = mask.defined() ? (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, /*keepdim=*/true)
                       : x.mean(1);
  }
  if (!dense_.is_empty()) {
    x = dropout_add(x, {}, is_training() ? head_.dropout_before : 0.0);
    x = Activation{head_.activation}(linear_of(dense_, x));
  }
  if (!norm_.is_empty()) {
    x = norm_->forward(x);
  }
  x = dropout_add(x, {}, is_training() ? head_.dropout : 0.0);
  return output_.is_empty() ? fast_linear(x, encoder_->words()->weight, decoder_bias_)
                            : output_->forward(x);
}

// Position embeddings of the original transformer: sines in even columns, cosines in odd ones.
static at::Tensor sinusoids(int64_t rows, int64_t width) {
  const at::Tensor column = at::arange(width, at::kDouble);
  const at::Tensor angle = at::arange(rows, at::kDouble).unsqueeze(1) /
                           at::pow(10000.0, at::floor(column / 2) * 2 / static_cast<double>(width));
  return at::where(column.remainder(2) == 0, angle.sin(), angle.cos());
}

void EncoderModel::init_weight(const std::string& name, const at::Tensor& weight) {
  const bool position = name.ends_with("position_embeddings.weight");
  if (position && parse_json("models::EncoderModel", "other_keys", config().other_keys)
                      .value("sinusoidal_pos_embds", false)) {
    weight.copy_(sinusoids(weight.size(0), weight.size(1)));
  } else if (weight.dim() > 1) {
    weight.normal_(0, encoder_->range_of(name, config().initializer_range));
    if (weight.is_same(encoder_->words()->weight) ||
        (position && config().max_tokens() < config().max_position_embeddings)) {
      weight[config().pad_token_id].zero_();
    }
  } else {
    PreTrainedModelImpl::init_weight(name, weight);
  }
}

std::shared_ptr<PreTrainedModelImpl> make_encoder_model(const PreTrainedConfig& config,
                                                        ModelTask task, const std::string& base,
                                                        std::shared_ptr<TextEncoder> encoder,
                                                        HeadSpec head) {
  return std::make_shared<EncoderModel>(config, task, base, std::move(encoder), std::move(head));
}

} // namespace hasten::detail
