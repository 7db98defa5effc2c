#include "objective_arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

constexpr const char* kObjectiveWhere = "trainer::training_arguments";

void validate_objective(const TrainingArguments& a) {
  const auto require = [](bool good,
                          const char* name,
                          const nlohmann::json& value,
                          const char* expected,
                          const char* fix = "") {
    if (!good) {
      throw InputError(
          kObjectiveWhere,
          std::string(name) + "=" + value.dump(),
          expected,
          fix);
    }
  };
  require(
      a.label_smoothing_factor >= 0 && a.label_smoothing_factor < 1,
      "label_smoothing_factor",
      a.label_smoothing_factor,
      "a share, 0 or more and below 1");
  class_weight_numbers(a.class_weights);
  require(
      a.early_stopping_patience >= 0,
      "early_stopping_patience",
      a.early_stopping_patience,
      "evaluations, 1 or more, or 0 to never stop early");
  require(
      a.early_stopping_threshold >= 0 &&
          std::isfinite(a.early_stopping_threshold),
      "early_stopping_threshold",
      a.early_stopping_threshold,
      "0 or more");
  require(
      a.early_stopping_threshold == 0 || a.early_stopping_patience > 0,
      "early_stopping_threshold",
      a.early_stopping_threshold,
      "0 without early_stopping_patience",
      "set early_stopping_patience");
  require(
      a.early_stopping_patience == 0 || a.eval_strategy != IntervalStrategy::no,
      "early_stopping_patience",
      a.early_stopping_patience,
      "evaluations to judge by: eval_strategy=no",
      "set eval_strategy to epoch or steps");
}

} // namespace detail

std::vector<double> class_weight_numbers(const std::string& class_weights) {
  std::vector<double> numbers;
  if (class_weights.empty() || class_weights == "balanced") {
    return numbers;
  }
  std::string_view rest = class_weights;
  while (true) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view item = rest.substr(0, comma);
    double number = 0;
    const char* end = item.data() + item.size();
    const auto read = std::from_chars(item.data(), end, number);
    if (read.ec != std::errc() || read.ptr != end || !(number > 0) ||
        !std::isfinite(number)) {
      throw InputError(
          detail::kObjectiveWhere,
          "class_weights=" + nlohmann::json(class_weights).dump(),
          "numbers above 0 by label, like 0.5,2, or balanced");
    }
    numbers.push_back(number);
    if (comma == rest.size()) {
      return numbers;
    }
    rest.remove_prefix(comma + 1);
  }
}

} // namespace hasten
