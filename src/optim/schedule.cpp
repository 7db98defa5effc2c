#include "hasten/optim/schedule.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "config/option_checks.h"
#include "hasten/base/error.h"

namespace hasten {

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : optimizer_(optimizer), schedule_(std::move(schedule)) {
  for (const auto& group : optimizer_.param_groups()) {
    base_lrs_.push_back(group.options().get_lr());
  }
  apply();
  open_lr_ = used_lr_ = last_lr_;
}

void LRScheduler::step() {
  ++completed_updates_;
  apply();
}

void LRScheduler::close_step() { used_lr_ = std::exchange(open_lr_, last_lr_); }

void LRScheduler::set(std::vector<double> base_lrs, int64_t completed_updates) {
  if (base_lrs.size() != base_lrs_.size()) {
    throw InputError("optim::LRScheduler",
                     "base_lrs of " + std::to_string(base_lrs.size()) + " parameter groups",
                     "the optimizer's " + std::to_string(base_lrs_.size()));
  }
  base_lrs_ = std::move(base_lrs);
  completed_updates_ = completed_updates;
  apply();
  open_lr_ = last_lr_;
}

void LRScheduler::apply() {
  const double multiplier = schedule_(completed_updates_);
  last_lr_.clear();
  for (size_t i = 0; i < base_lrs_.size(); ++i) {
    last_lr_.push_back(base_lrs_[i] * multiplier);
    optimizer_.param_groups()[i].options().set_lr(last_lr_[i]);
  }
}

void LRScheduler::save_state(NamedTensors&, nlohmann::json& values) const {
  values["completed_updates"] = completed_updates_;
  values["base_lrs"] = base_lrs_;
}

void LRScheduler::load_state(const NamedTensors&, const nlohmann::json& values) {
  detail::require_state("optim::LRScheduler", values, {"completed_updates", "base_lrs"});
  set(values.at("base_lrs").get<std::vector<double>>(),
      values.at("completed_updates").get<int64_t>());
}

} // namespace hasten
