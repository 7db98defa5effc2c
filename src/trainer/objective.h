// Label smoothing and class weights for any loss function of a Trainer.
#pragma once

#include "hasten/trainer/losses.h"

namespace hasten::detail {

/// Returns `inner` with its loss replaced by cross_entropy_output(how) of its outputs, which must
/// be logits, as in transformers' Trainer; with several labels per sample by
/// bce_with_logits_output(class_weights). Batches without labels are unchanged. `balanced`:
/// classes after the last weight have weight 1.
LossFunction with_objective(LossFunction inner, ClassificationLossOptions how, bool balanced);

} // namespace hasten::detail
