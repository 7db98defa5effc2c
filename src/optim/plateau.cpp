#include "hasten/optim/plateau.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "config/option_checks.h"
#include "hasten/base/error.h"

namespace hasten {

ReduceLrOnPlateau::ReduceLrOnPlateau(torch::optim::Optimizer& optimizer,
                                     ReduceLrOnPlateauOptions options)
    : optimizer_(optimizer), options_(options) {
  const auto check = [](bool good, const char* name, const char* expected) {
    if (!good) {
      throw InputError("optim::ReduceLrOnPlateau", name, expected);
    }
  };
  check(options_.factor > 0 && options_.factor < 1, "factor", "above 0, below 1");
  check(options_.patience >= 0, "patience", "0 or above");
  check(options_.threshold >= 0, "threshold", "0 or above");
  check(options_.cooldown >= 0, "cooldown", "0 or above");
  check(options_.min_lr >= 0, "min_lr", "0 or above");
  check(options_.eps >= 0, "eps", "0 or above");
}

bool ReduceLrOnPlateau::improved(double metric) const {
  if (!std::isfinite(metric)) {
    return false;
  }
  if (!any_) {
    return true;
  }
  const double sign = options_.greater_is_better ? 1 : -1;
  const double bound = options_.relative ? best_ * (1 + sign * options_.threshold)
                                         : best_ + sign * options_.threshold;
  return options_.greater_is_better ? metric > bound : metric < bound;
}

bool ReduceLrOnPlateau::step(double metric) {
  if (improved(metric)) {
    best_ = metric;
    any_ = true;
    num_bad_epochs_ = 0;
  } else {
    ++num_bad_epochs_;
  }
  if (cooldown_counter_ > 0) {
    --cooldown_counter_;
    num_bad_epochs_ = 0;
  }
  if (num_bad_epochs_ <= options_.patience) {
    return false;
  }
  cooldown_counter_ = options_.cooldown;
  num_bad_epochs_ = 0;
  bool reduced = false;
  for (auto& group : optimizer_.param_groups()) {
    const double old = group.options().get_lr();
    const double next = std::max(old * options_.factor, options_.min_lr);
    if (old - next > options_.eps) {
      group.options().set_lr(next);
      reduced = true;
    }
  }
  return reduced;
}

void ReduceLrOnPlateau::save_state(NamedTensors&, nlohmann::json& values) const {
  values["best"] = any_ ? nlohmann::json(best_) : nlohmann::json();
  values["num_bad_epochs"] = num_bad_epochs_;
  values["cooldown_counter"] = cooldown_counter_;
  values["lrs"] = nlohmann::json::array();
  for (const auto& group : optimizer_.param_groups()) {
    values["lrs"].push_back(group.options().get_lr());
  }
}

void ReduceLrOnPlateau::load_state(const NamedTensors&, const nlohmann::json& values) {
  detail::require_state("optim::ReduceLrOnPlateau", values,
                        {"best", "num_bad_epochs", "cooldown_counter", "lrs"});
  const auto lrs = values.at("lrs").get<std::vector<double>>();
  if (lrs.size() != optimizer_.param_groups().size()) {
    throw InputError("optim::ReduceLrOnPlateau",
                     "the state has lrs of " + std::to_string(lrs.size()) + " parameter groups",
                     "the optimizer's " + std::to_string(optimizer_.param_groups().size()));
  }
  any_ = !values.at("best").is_null();
  best_ = any_ ? values.at("best").get<double>() : 0;
  num_bad_epochs_ = values.at("num_bad_epochs").get<int64_t>();
  cooldown_counter_ = values.at("cooldown_counter").get<int64_t>();
  for (size_t i = 0; i < lrs.size(); ++i) {
    optimizer_.param_groups()[i].options().set_lr(lrs[i]);
  }
}

} // namespace hasten
