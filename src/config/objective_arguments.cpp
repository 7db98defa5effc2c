#include "objective_arguments.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/limits.h"
#include "hasten/base/text.h"
#include "hasten/config/training_plan.h"

namespace hasten {

namespace detail {

constexpr const char* kObjectiveWhere = "trainer::training_arguments";

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

void validate_ranges(const TrainingArguments& arguments) {
  const nlohmann::json json = arguments;
  for (const auto& range : kArgumentRanges) {
    const nlohmann::json& value = json.at(range.name);
    const auto number = value.get<double>();
    if (!(number >= static_cast<double>(range.least) &&
          number <= static_cast<double>(range.most))) {
      throw InputError(kObjectiveWhere, std::string(range.name) + "=" + value.dump(),
                       std::to_string(range.least) + " to " + std::to_string(range.most));
    }
  }
}

void validate_objective(const TrainingArguments& a) {
  const auto require = [](bool good, const char* name, const nlohmann::json& value,
                          const char* expected, const char* fix = "") {
    if (!good) {
      throw InputError(kObjectiveWhere, std::string(name) + "=" + value.dump(), expected, fix);
    }
  };
  require(a.label_smoothing_factor >= 0 && a.label_smoothing_factor < 1, "label_smoothing_factor",
          a.label_smoothing_factor, "0 or more and below 1");
  class_weight_numbers(a.class_weights);
  require(a.early_stopping_threshold >= 0 && std::isfinite(a.early_stopping_threshold),
          "early_stopping_threshold", a.early_stopping_threshold, "0 or more");
  require(a.early_stopping_threshold == 0 || a.early_stopping_patience > 0,
          "early_stopping_threshold", a.early_stopping_threshold,
          "0 without early_stopping_patience", "set early_stopping_patience");
  require(a.early_stopping_patience == 0 || a.eval_strategy != IntervalStrategy::no,
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
    double number = 0;
    const char* end = item.data() + item.size();
    const auto read = std::from_chars(item.data(), end, number);
    if (read.ec != std::errc() || read.ptr != end || !(number > 0) || !std::isfinite(number)) {
      throw InputError(detail::kObjectiveWhere,
                       "class_weights=" + nlohmann::json(class_weights).dump(),
                       "one number above 0 per label, e.g. 0.5,2, or balanced");
    }
    numbers.push_back(number);
  }
  return numbers;
}

} // namespace hasten
