#include "rotary.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>

#include "base/known_keys.h"
#include "encoder.h"

namespace hasten::detail {

// mscale of yarn.
static double yarn_scale(double factor, double by = 1) {
  return factor <= 1 ? 1.0 : 0.1 * by * std::log(factor) + 1.0;
}

static double default_attention_factor(const RotaryOptions& rotary, const nlohmann::json& scaling) {
  if (rotary.type == "longrope") {
    return rotary.factor <= 1 ? 1.0
                              : std::sqrt(1 + std::log(rotary.factor) / std::log(rotary.context));
  }
  const auto mscale = family_option(scaling, "mscale", 0.0);
  const auto of_all = family_option(scaling, "mscale_all_dim", 0.0);
  return rotary.type != "yarn" ? 1.0
         : mscale != 0 && of_all != 0
             ? yarn_scale(rotary.factor, mscale) / yarn_scale(rotary.factor, of_all)
             : yarn_scale(rotary.factor);
}

static void check_rotary(const RotaryOptions& rotary, const nlohmann::json& scaling,
                         int64_t head_width) {
  const auto require = [&](bool right, const std::string& expected) {
    if (!right) {
      throw InputError("models::RotaryOptions",
                       "config.json: rope_type=" + rotary.type.substr(0, 80) +
                           ", rope_theta=" + std::to_string(rotary.theta) +
                           ", rope_parameters=" + scaling.dump().substr(0, 300) +
                           ", head_dim=" + std::to_string(head_width),
                       expected);
    }
  };
  // The numbers that each type needs.
  static const std::map<std::string, std::vector<const char*>> needed = {
      {"default", {}},
      {"linear", {"factor"}},
      {"dynamic", {"factor"}},
      {"yarn", {"factor"}},
      {"longrope", {"short_factor", "long_factor"}},
      {"llama3", {"factor", "low_freq_factor", "high_freq_factor"}}};
  const auto type = needed.find(rotary.type);
  require(type != needed.end(),
          "\"default\", \"linear\", \"dynamic\", \"yarn\", \"longrope\" or \"llama3\"");
  for (const char* key : type->second) {
    require(!scaling.value(key, nlohmann::json()).is_null(), std::string(key) + " of this type");
  }
  const int64_t width = rotary.width(head_width);
  require(
      rotary.partial_factor > 0 && rotary.partial_factor <= 1 && width % 2 == 0 &&
          width > (rotary.type == "dynamic" ? 2 : 0),
      "a partial_rotary_factor that rotates an even number of elements, above 2 for \"dynamic\"");
  require(rotary.theta > 1 && rotary.factor >= 1 && rotary.low_freq > 0 &&
              rotary.high_freq > rotary.low_freq && rotary.context > 1 && rotary.beta_slow > 0 &&
              rotary.beta_fast > rotary.beta_slow && rotary.attention_factor > 0,
          "a rope_theta above 1, a factor of 1 or more, positive numbers, low_freq_factor below "
          "high_freq_factor, beta_slow below beta_fast");
  for (const auto& factors : {rotary.short_factors, rotary.long_factors}) {
    require(rotary.type != "longrope" ||
                (std::ssize(factors) == width / 2 &&
                 std::ranges::all_of(factors, [](float each) { return each > 0; })),
            std::to_string(width / 2) + " positive numbers in short_factor and in long_factor");
  }
}

static RotaryOptions read_rotary(const nlohmann::json& scaling, RotaryOptions rotary,
                                 int64_t head_width) {
  check_known_keys("models::pretrained", "config.json", "config.json", "rope_parameters", scaling);
  const auto take = [&](const char* key, auto& value) {
    value = family_option(scaling, key, value);
  };
  take("rope_theta", rotary.theta);
  take("type", rotary.type);
  take("rope_type", rotary.type);
  take("short_factor", rotary.short_factors);
  take("long_factor", rotary.long_factors);
  if (rotary.type == "su" || (rotary.type == "yarn" && !rotary.long_factors.empty())) {
    rotary.type = "longrope"; // in the first files of Phi-3
  }
  take("original_max_position_embeddings", rotary.context);
  if (rotary.type == "longrope" && rotary.max_positions > rotary.context) {
    rotary.factor = rotary.max_positions / rotary.context;
  }
  take("factor", rotary.factor);
  take("low_freq_factor", rotary.low_freq);
  take("high_freq_factor", rotary.high_freq);
  take("beta_fast", rotary.beta_fast);
  take("beta_slow", rotary.beta_slow);
  take("truncate", rotary.truncate);
  take("partial_rotary_factor", rotary.partial_factor);
  take("llama_4_scaling_beta", rotary.query_beta);
  rotary.attention_factor = default_attention_factor(rotary, scaling);
  take("attention_factor", rotary.attention_factor);
  check_rotary(rotary, scaling, head_width);
  return rotary;
}

RotaryOptions RotaryOptions::of(const nlohmann::json& options, int64_t max_position_embeddings,
                                int64_t head_width) {
  auto scaling = family_object(options, "rope_scaling"); // of older files
  if (scaling.empty()) {
    scaling = family_object(options, "rope_parameters");
  }
  const auto longest = static_cast<double>(max_position_embeddings);
  const auto context = options.find("original_max_position_embeddings");
  if (context != options.end()) { // it wins over that of rope_scaling
    scaling["original_max_position_embeddings"] = *context;
  }
  return read_rotary(scaling,
                     {.theta = family_option(options, "rope_theta", 10'000.0),
                      .context = longest,
                      .max_positions = longest,
                      .partial_factor = family_option(options, "partial_rotary_factor", 1.0)},
                     head_width);
}

RotaryOptions RotaryOptions::of_layers(const nlohmann::json& options, const std::string& model_type,
                                       const char* layers, const char* old_theta,
                                       int64_t max_position_embeddings, int64_t head_width,
                                       double default_theta) {
  const auto parameters = family_object(options, "rope_parameters");
  for (const auto& [key, value] : parameters.items()) {
    if (!value.is_object() && !value.is_null()) { // one for all types of layers
      throw InputError("models::RotaryOptions", "config.json: rope_parameters has " + key,
                       "an object for each type of layer");
    }
  }
  check_known_keys("models::pretrained", "config.json", "config.json",
                   "rope_parameters:" + model_type, parameters);
  auto scaling = family_object(parameters, layers);
  if (std::string_view(layers) == "full_attention") {
    scaling.update(family_object(options, "rope_scaling"));
  }
  const auto longest = static_cast<double>(max_position_embeddings);
  return read_rotary(scaling,
                     {.theta = family_option(options, old_theta, default_theta),
                      .context = longest,
                      .max_positions = longest},
                     head_width);
}

// 0 for the first waves, with `beta_fast` periods in `context`, 1 from `beta_slow` on.
static at::Tensor yarn_ramp(const RotaryOptions& rotary, int64_t width, const at::Device& device) {
  const auto number_of = [&](double periods) { // of the wave with so many periods
    return static_cast<double>(width) *
           std::log(rotary.context / (periods * 2 * std::numbers::pi)) /
           (2 * std::log(rotary.theta));
  };
  double low = number_of(rotary.beta_fast), high = number_of(rotary.beta_slow);
  if (rotary.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(width - 1));
  high += low == high ? 0.001 : 0.0;
  return ((at::arange(width / 2, at::TensorOptions(at::kFloat).device(device)) - low) /
          (high - low))
      .clamp(0, 1);
}

at::Tensor text_numbers(const at::Tensor& positions) {
  const at::Tensor steps = positions.slice(1, 1) - positions.slice(1, 0, -1);
  return at::constant_pad_nd(steps.ne(1), {1, 0}).cumsum(1);
}

// The number of tokens of each token's text, so that a device need not wait: [B, T, 1] or [1].
static at::Tensor text_lengths(const at::Tensor& positions) {
  if (positions.dim() == 1) {
    return positions.max().view({1}) + 1;
  }
  const at::Tensor texts = text_numbers(positions);
  const at::Tensor last =
      at::zeros_like(positions).scatter_reduce(1, texts, positions, "amax").gather(1, texts);
  return (last + 1).unsqueeze(-1);
}

at::Tensor RotaryOptions::frequencies(int64_t width, const at::Tensor& positions) const {
  const auto numbers = at::TensorOptions().dtype(at::kFloat).device(positions.device());
  const at::Tensor exponents = at::arange(0, width, 2, numbers) / static_cast<double>(width);
  const at::Tensor plain = 1.0 / at::pow(theta, exponents);
  if (type == "dynamic") {
    const at::Tensor length = text_lengths(positions).to(at::kFloat).clamp_min(max_positions);
    const auto power = static_cast<double>(width) / static_cast<double>(width - 2);
    const at::Tensor growth = length * (factor / max_positions) - (factor - 1);
    return 1.0 / at::pow(growth.pow(power) * theta, exponents);
  }
  if (type == "longrope") {
    const auto divisors = [&](const std::vector<float>& of) { return at::tensor(of).to(numbers); };
    return plain / at::where(text_lengths(positions) > context, divisors(long_factors),
                             divisors(short_factors));
  }
  if (type == "yarn") {
    const at::Tensor stretched = yarn_ramp(*this, width, positions.device());
    return plain / factor * stretched + plain * (1 - stretched);
  }
  if (type != "llama3") {
    return type == "linear" ? plain / factor : plain;
  }
  const at::Tensor waves = 2 * std::numbers::pi / plain; // in tokens
  const at::Tensor smooth = (context / waves - low_freq) / (high_freq - low_freq);
  const at::Tensor between = (1 - smooth) * plain / factor + smooth * plain;
  return at::where(waves > context / low_freq, plain / factor,
                   at::where(waves < context / high_freq, plain, between));
}

RotaryTable::RotaryTable(const RotaryOptions& options, const at::Tensor& positions,
                         int64_t head_width, const at::Tensor& hidden) {
  const at::Tensor frequencies = options.frequencies(options.width(head_width), positions);
  const at::Tensor angles = positions.to(at::kFloat).unsqueeze(-1) * frequencies;
  const auto table = [&](const at::Tensor& of_angles) {
    return (of_angles * options.attention_factor).to(hidden.scalar_type()).unsqueeze(-2);
  };
  cosines = table(angles.cos());
  sines = table(angles.sin());
  if (options.query_beta > 0) {
    const at::Tensor times = (positions.to(at::kFloat) / options.context).floor();
    query_scale = (1 + options.query_beta * times.log1p()).to(hidden.scalar_type()).unsqueeze(-1);
  }
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosines, const at::Tensor& sines,
                   int64_t heads) {
  const at::Tensor by_head = x.reshape({x.size(0), x.size(1), heads, -1}).to(cosines.scalar_type());
  const int64_t half = cosines.size(-1);
  const at::Tensor first = by_head.narrow(3, 0, half), second = by_head.narrow(3, half, half);
  std::vector<at::Tensor> parts = {first * cosines - second * sines,
                                   second * cosines + first * sines};
  if (by_head.size(3) > 2 * half) {
    parts.push_back(by_head.slice(3, 2 * half));
  }
  return at::cat(parts, -1).to(x.scalar_type()).view({x.size(0), x.size(1), x.size(2)});
}

} // namespace hasten::detail
