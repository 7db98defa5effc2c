#include "rotary.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <numbers>

#include "base/known_keys.h"
#include "encoder.h"

namespace hasten::detail {

RotaryOptions RotaryOptions::of(const nlohmann::json& options, int64_t max_position_embeddings,
                                double default_theta) {
  auto scaling = family_object(options, "rope_scaling"); // of older files
  if (scaling.empty()) {
    scaling = family_object(options, "rope_parameters");
  }
  check_known_keys("models::pretrained", "config.json", "config.json", "rope_parameters", scaling);
  RotaryOptions rotary;
  rotary.theta =
      family_option(scaling, "rope_theta", family_option(options, "rope_theta", default_theta));
  rotary.type = family_option(scaling, "rope_type", family_option(scaling, "type", rotary.type));
  rotary.factor = family_option(scaling, "factor", rotary.factor);
  rotary.low_freq = family_option(scaling, "low_freq_factor", rotary.low_freq);
  rotary.high_freq = family_option(scaling, "high_freq_factor", rotary.high_freq);
  rotary.context = family_option(scaling, "original_max_position_embeddings",
                                 static_cast<double>(max_position_embeddings));
  for (const char* key : {"factor", "low_freq_factor", "high_freq_factor"}) {
    const bool needed = rotary.type == "llama3" || (rotary.type == "linear" && key[0] == 'f');
    if (needed && scaling.value(key, nlohmann::json()).is_null()) {
      throw InputError("models::RotaryOptions",
                       "config.json: rope_type=" + rotary.type + " without " + key,
                       "the numbers of this type");
    }
  }
  const bool known = rotary.type == "default" || rotary.type == "linear" || rotary.type == "llama3";
  if (!known || !(rotary.theta > 0 && rotary.factor >= 1 && rotary.low_freq > 0 &&
                  rotary.high_freq > rotary.low_freq && rotary.context > 0)) {
    throw InputError("models::RotaryOptions",
                     "config.json: rope_type=" + rotary.type.substr(0, 80) +
                         ", rope_theta=" + std::to_string(rotary.theta) +
                         ", factor=" + std::to_string(rotary.factor) +
                         ", low_freq_factor=" + std::to_string(rotary.low_freq) +
                         ", high_freq_factor=" + std::to_string(rotary.high_freq) +
                         ", original_max_position_embeddings=" + std::to_string(rotary.context),
                     "rope_type \"default\", \"linear\" or \"llama3\", a factor of 1 or more, and "
                     "positive numbers, low_freq_factor below high_freq_factor");
  }
  return rotary;
}

at::Tensor RotaryOptions::frequencies(int64_t width, const at::Device& device) const {
  const auto numbers = at::TensorOptions().dtype(at::kFloat).device(device);
  const at::Tensor exponents = at::arange(0, width, 2, numbers) / static_cast<double>(width);
  const at::Tensor plain = 1.0 / at::pow(theta, exponents);
  if (type != "llama3") {
    return type == "linear" ? plain / factor : plain;
  }
  const at::Tensor waves = 2 * std::numbers::pi / plain; // in tokens
  const at::Tensor smooth = (context / waves - low_freq) / (high_freq - low_freq);
  const at::Tensor between = (1 - smooth) * plain / factor + smooth * plain;
  return at::where(waves > context / low_freq, plain / factor,
                   at::where(waves < context / high_freq, plain, between));
}

RotaryTable::RotaryTable(const RotaryOptions& options, const at::Tensor& positions, int64_t width,
                         const at::Tensor& hidden) {
  const at::Tensor frequencies = options.frequencies(width, hidden.device());
  const at::Tensor angles = positions.to(at::kFloat).unsqueeze(-1) * frequencies;
  cosines = angles.cos().to(hidden.scalar_type()).unsqueeze(-2);
  sines = angles.sin().to(hidden.scalar_type()).unsqueeze(-2);
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                   int64_t heads) {
  const at::Tensor by_head = x.reshape({x.size(0), x.size(1), heads, -1}).to(cosines.scalar_type());
  const auto halves = by_head.chunk(2, -1);
  return at::cat({halves[0] * cosines - halves[1] * sines, halves[1] * cosines + halves[0] * sines},
                 -1)
      .to(x.scalar_type())
      .view({x.size(0), x.size(1), x.size(2)});
}

} // namespace hasten::detail
