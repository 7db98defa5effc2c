// The checks of TrainingArguments for the loss, for early stopping and for ranges of numbers.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "hasten/config/training_arguments.h"

namespace hasten::detail {

inline constexpr const char* kArgumentsPlace = "trainer::training_arguments";

/// Throws InputError unless `good`: "name=value. Expected expected. Fix: fix."
void require_argument(bool good, const char* name, const nlohmann::json& value,
                      const std::string& expected, const std::string& fix = {});

/// The part of TrainingArguments::validate() for label smoothing, class weights and
/// early stopping.
void validate_objective(const TrainingArguments& arguments);

/// Throws InputError for the first number out of its range.
void validate_ranges(const TrainingArguments& arguments);

} // namespace hasten::detail
