// The checks of TrainingArguments for the loss, for early stopping and for ranges of numbers.
#pragma once

#include "hasten/config/training_arguments.h"

namespace hasten::detail {

/// The part of TrainingArguments::validate() for label smoothing, class weights and
/// early stopping.
void validate_objective(const TrainingArguments& arguments);

/// Throws InputError for the first number out of its range.
void validate_ranges(const TrainingArguments& arguments);

} // namespace hasten::detail
