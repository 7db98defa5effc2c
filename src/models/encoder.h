// What hasten's encoder families share: layers without initial values, encoders of text, and a model
// of an encoder and a head.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "hasten/base/error.h"
#include "hasten/core/linear.h"
#include "hasten/models/pretrained_model.h"

namespace hasten::detail {

/// A value of config.json that only one family has.
template <typename T>
T family_option(const nlohmann::json& options, const char* key, T fallback) {
  const auto found = options.find(key);
  if (found == options.end() || found->is_null()) {
    return fallback;
  }
  try {
    return found->template get<T>();
  } catch (const nlohmann::json::exception&) {
    throw InputError("models::PreTrainedConfig",
                     std::string("config.json: ") + key + "=" + found->dump().substr(0, 200),
                     "a value of another type");
  }
}

/// An option that is an object; an empty one if it is missing.
inline nlohmann::json family_object(const nlohmann::json& options, const char* key) {
  auto object = family_option(options, key, nlohmann::json::object());
  if (!object.is_object()) {
    throw InputError("models::PreTrainedConfig",
                     std::string("config.json: ") + key + "=" + object.dump().substr(0, 200),
                     "an object");
  }
  return object;
}

/// Weights are uninitialised.
torch::nn::Linear make_linear(int64_t in, int64_t out, bool bias = true);
torch::nn::Embedding make_embedding(int64_t rows, int64_t width,
                                    std::optional<int64_t> padding = {});
torch::nn::LayerNorm make_norm(const PreTrainedConfig& config, bool bias = true);

at::Tensor linear_of(const torch::nn::Linear& layer, const at::Tensor& x,
                     const Activation& activation = {});

/// fast_linear, with the short way of generation and what an adapter adds. `parameter`: what `weight`
/// is a view of; null: weight itself.
at::Tensor product_of(const Activation& activation, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias = {}, const at::Tensor* parameter = nullptr);

/// Registers a module or a parameter under a dotted path, making the modules between.
void register_path(torch::nn::Module& root, const std::string& path,
                   std::shared_ptr<torch::nn::Module> module);
void register_path(torch::nn::Module& root, const std::string& path, const at::Tensor& parameter);
/// Returns the module, for a member's initial value.
template <typename Holder>
Holder registered(torch::nn::Module& root, const std::string& path, Holder module) {
  register_path(root, path, module.ptr());
  return module;
}

/// [B, T], true at padding; undefined if there is none (which a CPU looks up) or no mask.
at::Tensor padding_of(const at::Tensor& attention_mask);
/// Lowest finite value where `ignored`, else 0, in the dtype of attention's products.
at::Tensor additive_mask(const at::Tensor& ignored, const at::Tensor& hidden);

class TextEncoder : public torch::nn::Module {
 public:
  /// The last block's hidden states: [B, T, H], or [B, 1, H] of the first token.
  virtual at::Tensor encode(const ModelInputs& inputs, bool first_token_only) = 0;
  virtual const torch::nn::Embedding& words() const = 0;
  /// Standard deviation of a parameter's new values.
  virtual double range_of(const std::string& /*name*/, double initializer_range) const {
    return initializer_range;
  }
};

/// Names of the modules of an encoder as BERT has it.
struct EncoderNames {
  const char* layers;
  const char *query, *key, *value, *attention_output, *attention_norm;
  const char *intermediate, *output, *output_norm;
  bool positions_after_padding;
};
std::shared_ptr<TextEncoder> make_bert_encoder(const PreTrainedConfig& config,
                                               const EncoderNames& names);
std::shared_ptr<TextEncoder> make_modern_bert_encoder(const PreTrainedConfig& config);

/// A head: dropout, dense, activation, norm, dropout, output. Empty names are not there.
struct HeadSpec {
  std::string dense{};
  std::string norm{};
  /// Module of the last projection. For masked_lm: name of its bias; the weights are those of the
  /// word embeddings.
  std::string output{};
  /// For masked_lm: name that files may have for those weights.
  std::string tied{};
  std::string activation = "gelu";
  double dropout_before = 0;
  double dropout = 0;
  bool dense_bias = true;
  bool norm_bias = true;
  /// Pools by the mean over tokens instead of taking the first.
  bool mean_pooling = false;
};

std::shared_ptr<PreTrainedModelImpl> make_encoder_model(const PreTrainedConfig& config,
                                                        ModelTask task, const std::string& base,
                                                        std::shared_ptr<TextEncoder> encoder,
                                                        HeadSpec head);

} // namespace hasten::detail
