// The keys and values that a decoder has computed, so that it reads each token once: transformers'
// DynamicCache.
// Threading: one thread per cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace hasten {

/// Belongs to one batch of one model. Pass it in ModelInputs::past_key_values, without gradients.
/// Memory: for each sample and token 2 * layers * key-value heads * head width elements, and up to as
/// much again for tokens to come.
class KeyValueCache {
 public:
  /// Appends a layer's keys and values, [B, heads, T, width]. Returns those of all tokens so far,
  /// [B, heads, length, width], which share the cache's memory. Layers begin at 0. Throws InputError
  /// if another batch, number of heads or width was there before.
  std::pair<at::Tensor, at::Tensor> update(size_t layer, const at::Tensor& keys,
                                           const at::Tensor& values);
  /// Tokens of a sample that all layers have read.
  int64_t length() const { return layers_.empty() ? 0 : layers_.back().length; }
  /// Keeps the samples `rows` [n] int64, in this order.
  void select_rows(const at::Tensor& rows);

 private:
  struct Layer {
    at::Tensor keys{}, values{}; // [B, heads, capacity, width]
    int64_t length = 0;
  };
  std::vector<Layer> layers_{};
};

} // namespace hasten
