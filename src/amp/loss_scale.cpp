#include "hasten/amp/loss_scale.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

constexpr const char* kScaleWhere = "amp::GradScaler";

static void require_scale(bool good, const char* name, double value, const char* is) {
  if (!good) {
    throw InputError(kScaleWhere, std::string(name) + "=" + format_digits(value), is);
  }
}

static bool is_scale(double value) { return value > 0 && std::isfinite(static_cast<float>(value)); }

} // namespace detail

LossScale::LossScale(GradScalerOptions options) : options_(options), scale_(options.init_scale) {
  detail::require_scale(detail::is_scale(options.init_scale), "init_scale", options.init_scale,
                        "a number above 0 that fp32 holds");
  detail::require_scale(options.growth_factor > 1 && std::isfinite(options.growth_factor),
                        "growth_factor", options.growth_factor, "a number above 1");
  detail::require_scale(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor",
                        options.backoff_factor, "a number above 0 and below 1");
  detail::require_scale(options.growth_interval >= 1, "growth_interval",
                        static_cast<double>(options.growth_interval), "1 or more");
}

// As torch's at::_amp_update_scale_: the scale is an fp32 tensor, the factors are fp64.
void LossScale::update(bool found_inf) {
  if (!options_.enabled) {
    return;
  }
  const double before = scale_;
  if (found_inf) {
    const auto next = static_cast<float>(static_cast<float>(scale_) * options_.backoff_factor);
    scale_ = next > 0 ? next : scale_;
    growth_tracker_ = 0;
    log_info("loss scale: a gradient is not finite, the step is skipped: " + format_digits(before) +
             " -> " + format_digits(scale_));
    if (before >= 1 && scale_ < 1) {
      log_warning(
          "loss scale: the gradients overflow without being scaled up: look for "
          "a loss that diverges, lower the learning rate, or use bf16");
    }
    return;
  }
  if (++growth_tracker_ < options_.growth_interval) {
    return;
  }
  growth_tracker_ = 0;
  const auto next = static_cast<float>(static_cast<float>(scale_) * options_.growth_factor);
  if (std::isfinite(next)) {
    scale_ = next;
    log_info("loss scale: " + std::to_string(options_.growth_interval) +
             " steps without an overflow: " + format_digits(before) + " -> " +
             format_digits(scale_));
  }
}

void LossScale::set_scale(double scale) {
  detail::require_scale(detail::is_scale(scale), "scale", scale,
                        "a number above 0 that fp32 holds");
  scale_ = static_cast<float>(scale);
}

void LossScale::save_state(NamedTensors& /*tensors*/, nlohmann::json& values) const {
  values = nlohmann::json::object();
  if (options_.enabled) {
    values = {{"scale", scale_},
              {"growth_factor", options_.growth_factor},
              {"backoff_factor", options_.backoff_factor},
              {"growth_interval", options_.growth_interval},
              {"_growth_tracker", growth_tracker_}};
  }
}

void LossScale::load_state(const NamedTensors& /*tensors*/, const nlohmann::json& values) {
  if (!options_.enabled) {
    return;
  }
  if (values.empty()) {
    throw InputError(
        detail::kScaleWhere, "the state is empty: it was saved by a scaler that was not enabled",
        "the state of an enabled one", "set enabled=false, or begin with a new scaler");
  }
  GradScalerOptions options = options_;
  values.at("growth_factor").get_to(options.growth_factor);
  values.at("backoff_factor").get_to(options.backoff_factor);
  values.at("growth_interval").get_to(options.growth_interval);
  LossScale loaded(options); // checks the values
  loaded.set_scale(values.at("scale").get<double>());
  values.at("_growth_tracker").get_to(loaded.growth_tracker_);
  *this = loaded;
}

} // namespace hasten
