#include "objective_arguments.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/config/training_plan.h"

namespace hasten {

namespace detail {

/// Ends included. Batch size * accumulation * processes (kMaxWorldSize) stays below 2^63.
constexpr struct {
  const char* name;
  int64_t least, most;
} kArgumentRanges[] = {{"num_train_epochs", 0, 1'000'000},
                       {"max_steps", -1, kMaxSteps},
                       {"per_device_train_batch_size", 1, 16'777'216},
                       {"per_device_eval_batch_size", 1, 16'777'216},
                       {"gradient_accumulation_steps", 1, 1'048'576},
                       {"shard_size", 0, kMaxWorldSize},
                       {"local_sgd_steps", 0, kMaxSteps},
                       {"warmup_steps", 0, kMaxSteps},
                       {"logging_steps", 0, kMaxSteps},
                       {"eval_steps", 0, kMaxSteps},
                       {"save_steps", 0, kMaxSteps},
                       {"save_total_limit", 0, kMaxSteps},
                       {"early_stopping_patience", 0, kMaxSteps},
                       {"dataloader_num_workers", 0, 1024},
                       {"dataloader_prefetch_factor", 1, 1024},
                       {"max_length", 1, 1'048'576}};

void require_argument(bool good, const char* name, const nlohmann::json& value,
                      const std::string& expected, const std::string& fix) {
  if (!good) {
    throw InputError(kArgumentsPlace, std::string(name) + "=" + value.dump(), expected, fix);
  }
}

void validate_ranges(const TrainingArguments& arguments) {
  const nlohmann::json json = arguments;
  for (const auto& [name, least, most] : kArgumentRanges) {
    const auto number = json.at(name).get<double>();
    require_argument(number >= static_cast<double>(least) && number <= static_cast<double>(most),
                     name, json.at(name), std::to_string(least) + " to " + std::to_string(most));
  }
}

void validate_objective(const TrainingArguments& a) {
  require_argument(a.label_smoothing_factor >= 0 && a.label_smoothing_factor < 1,
                   "label_smoothing_factor", a.label_smoothing_factor, "0 or more and below 1");
  class_weight_numbers(a.class_weights);
  require_argument(a.early_stopping_threshold >= 0 && std::isfinite(a.early_stopping_threshold),
                   "early_stopping_threshold", a.early_stopping_threshold, "0 or more");
  require_argument(a.early_stopping_threshold == 0 || a.early_stopping_patience > 0,
                   "early_stopping_threshold", a.early_stopping_threshold,
                   "0 without early_stopping_patience", "set early_stopping_patience");
  require_argument(a.early_stopping_patience == 0 || a.eval_strategy != IntervalStrategy::no,
                   "early_stopping_patience", a.early_stopping_patience, "0 with eval_strategy=no",
                   "set eval_strategy to epoch or steps");
}

} // namespace detail

std::vector<double> class_weight_numbers(const std::string& class_weights) {
  std::vector<double> numbers;
  if (class_weights.empty() || class_weights == "balanced") {
    return numbers;
  }
  for (const std::string& item : split(class_weights)) {
    const double number = parse_number<double>(item).value_or(0);
    detail::require_argument(number > 0 && std::isfinite(number), "class_weights", class_weights,
                             "one number above 0 per label, e.g. 0.5,2, or balanced");
    numbers.push_back(number);
  }
  return numbers;
}

} // namespace hasten
