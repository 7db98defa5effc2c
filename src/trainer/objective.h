// Label smoothing and class weights around whatever loss function a Trainer has.
#pragma once

#include "hasten/trainer/losses.h"

namespace hasten::detail {

/// `inner`, whose outputs are logits, with cross_entropy_output(how) of them in place
/// of its loss where the batch has labels, as transformers' Trainer does it; with
/// several labels a row bce_with_logits_output(class_weights). `balanced`: classes
/// behind the last weight count 1.
LossFunction with_objective(LossFunction inner, ClassificationLossOptions how, bool balanced);

} // namespace hasten::detail
