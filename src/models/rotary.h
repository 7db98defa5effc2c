// Rotary positions (Su et al. 2021, RoFormer), as transformers' families have them.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace hasten::detail {

/// How fast the angles of positions grow. The types and their numbers are transformers' (modeling_rope_utils).
struct RotaryOptions {
  double theta = 10'000;
  /// "default"; "linear": all angles divided by `factor`; "llama3": only those of long waves; "dynamic":
  /// a theta that grows with texts above max_positions; "yarn" (Peng et al. 2023): long waves are
  /// stretched by `factor`, with cosines and sines scaled; "longrope" (Ding et al. 2024): each angle has
  /// a divisor, other ones in texts above `context`, and cosines and sines are scaled.
  std::string type = "default";
  double factor = 1;
  /// llama3: waves longer than context / low_freq are stretched, those shorter than context /
  /// high_freq kept, those between interpolated.
  double low_freq = 1, high_freq = 4;
  /// yarn: the periods in `context` of the waves between which angles are interpolated.
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;
  std::vector<float> short_factors{}, long_factors{}; // longrope
  double context = 0, max_positions = 0; // in tokens
  double partial_factor = 1; // the share of a head that is rotated, its first elements
  double attention_factor = 1; // of cosines and sines
  /// Queries from token `context` on are scaled by 1 + query_beta * log(1 + floor(position / context)).
  double query_beta = -1; // not given

  /// Of a config.json's rope_scaling, else rope_parameters, and rope_theta. Throws InputError for another
  /// type, and for a number that is missing or out of range.
  static RotaryOptions of(const nlohmann::json& options, int64_t max_position_embeddings,
                          int64_t head_width);
  /// Those of "full_attention" or "sliding_attention", which have objects of their own in
  /// rope_parameters. Older files have `old_theta`, and rope_scaling for full_attention.
  static RotaryOptions of_layers(const nlohmann::json& options, const std::string& model_type,
                                 const char* layers, const char* old_theta,
                                 int64_t max_position_embeddings, int64_t head_width,
                                 double default_theta = 10'000);
  /// Tokens of the longest text.
  int64_t longest() const {
    return static_cast<int64_t>(max_positions * (type == "dynamic" ? factor : 1));
  }
  int64_t width(int64_t head_width) const {
    return static_cast<int64_t>(static_cast<double>(head_width) * partial_factor);
  }
  /// The angles of position 1, in fp32: [width / 2]. Those of "dynamic" and "longrope" depend on the length
  /// of a text, so that they are [B, T, width / 2] for positions [B, T]. transformers takes that of the
  /// batch's longest text for all.
  at::Tensor frequencies(int64_t width, const at::Tensor& positions) const;
};

/// Cosines and sines of the angles by which `positions` [T] or [B, T] rotate queries and keys:
/// [T, 1, width / 2] or [B, T, 1, width / 2], in the dtype of `hidden`.
struct RotaryTable {
  RotaryTable(const RotaryOptions& options, const at::Tensor& positions, int64_t head_width,
              const at::Tensor& hidden);
  at::Tensor cosines;
  at::Tensor sines;
  at::Tensor query_scale; // [T, 1] or [B, T, 1]; undefined: 1
};

/// The number of each token's text in its row: positions [B, T] that do not count on begin another text.
at::Tensor text_numbers(const at::Tensor& positions);

/// x [B, T, heads * width], each head's vector rotated by its position's angles, as far as these go.
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                   int64_t heads);

} // namespace hasten::detail
