// Rotary positions (Su et al. 2021, RoFormer), as transformers' families have them.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace hasten::detail {

/// How fast the angles of positions grow.
struct RotaryOptions {
  double theta = 10'000;
  /// "default"; "linear": all angles divided by `factor`; "llama3": only those of long waves.
  std::string type = "default";
  double factor = 1;
  /// llama3: waves longer than context / low_freq are stretched, those shorter than context /
  /// high_freq kept, those between interpolated.
  double low_freq = 1, high_freq = 4, context = 0;

  /// Of a config.json's rope_scaling, else rope_parameters, and rope_theta. Throws InputError for another
  /// type, and for a number that is missing or out of range.
  static RotaryOptions of(const nlohmann::json& options, int64_t max_position_embeddings,
                          double default_theta);
  /// The angles of position 1: [width / 2], fp32.
  at::Tensor frequencies(int64_t width, const at::Device& device) const;
};

/// Cosines and sines of the angles by which `positions` [T] or [B, T] rotate queries and keys:
/// [T, 1, width / 2] or [B, T, 1, width / 2], in the dtype of `hidden`.
struct RotaryTable {
  RotaryTable(const RotaryOptions& options, const at::Tensor& positions, int64_t width,
              const at::Tensor& hidden);
  at::Tensor cosines;
  at::Tensor sines;
};

/// x [B, T, heads * width], each head's vector rotated by its position's angles.
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                   int64_t heads);

} // namespace hasten::detail
