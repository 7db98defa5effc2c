// What TrainingArguments say of the loss and of when training is over.
#pragma once

#include "hasten/trainer/training_arguments.h"

namespace hasten::detail {

/// The part of TrainingArguments::validate() for label smoothing, class weights and
/// early stopping.
void validate_objective(const TrainingArguments& arguments);

} // namespace hasten::detail
