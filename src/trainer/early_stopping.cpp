#include "hasten/trainer/early_stopping.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "trainer_parts.h"

namespace hasten {

EarlyStoppingCallback::EarlyStoppingCallback(EarlyStoppingOptions options) : options_(options) {
  const auto require = [](bool good, const std::string& what, const char* least) {
    if (!good) {
      throw InputError("trainer::EarlyStoppingCallback", what, least);
    }
  };
  require(options.early_stopping_patience >= 1,
          "early_stopping_patience=" + std::to_string(options.early_stopping_patience),
          "1 or more");
  require(options.early_stopping_threshold >= 0 && std::isfinite(options.early_stopping_threshold),
          "early_stopping_threshold=" + std::to_string(options.early_stopping_threshold),
          "0 or more");
}

void EarlyStoppingCallback::on_train_begin(const RunDescription& run) {
  if (run.eval_rows == 0 || run.arguments.eval_strategy == IntervalStrategy::no) {
    throw InputError("trainer::EarlyStoppingCallback",
                     run.eval_rows == 0 ? "no evaluation data" : "eval_strategy=no",
                     "evaluations during training",
                     "pass evaluation data, and set eval_strategy to epoch or steps");
  }
  metric_ = run.arguments.best_metric_name();
  greater_ = run.arguments.best_is_greater();
}

void EarlyStoppingCallback::on_evaluate(const nlohmann::json& record) {
  const auto found = record.find(metric_);
  if (found == record.end()) {
    detail::refuse_metric(metric_, record);
  }
  const double value = found->is_number() ? found->get<double>() : NAN;
  const auto better = [&](double by) {
    return !best_ ||
           ((greater_ ? value > *best_ : value < *best_) && std::abs(value - *best_) > by);
  };
  if (std::isfinite(value) && better(options_.early_stopping_threshold)) {
    patience_counter_ = 0;
  } else {
    ++patience_counter_;
  }
  if (std::isfinite(value) && better(0)) {
    best_ = value;
  }
  if (patience_counter_ >= options_.early_stopping_patience) {
    control().should_training_stop = true;
  }
}

void EarlyStoppingCallback::save_state(NamedTensors&, nlohmann::json& values) const {
  values = {{"best", best_ ? nlohmann::json(*best_) : nlohmann::json(nullptr)},
            {"patience_counter", patience_counter_}};
}

void EarlyStoppingCallback::load_state(const NamedTensors&, const nlohmann::json& values) {
  const auto counter = values.at("patience_counter").get<int64_t>();
  const auto& best = values.at("best");
  best_ = best.is_null() ? std::nullopt : std::optional(best.get<double>());
  patience_counter_ = counter;
}

} // namespace hasten
