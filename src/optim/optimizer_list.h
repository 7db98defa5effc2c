// hasten's optimizers. A new one has its header and source, a name in OptimizerType
// (training_arguments.h), its source in CMakeLists.txt, and a row here.
#pragma once

#include "hasten/optim/adafactor.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/lion.h"
#include "hasten/optim/sgd.h"

namespace hasten::detail {

/// Calls use.operator()<Optimizer>(its name in OptimizerType), until it returns true. Returns
/// whether it did.
template <typename Use>
bool any_optimizer(const Use& use) {
  return use.template operator()<AdamW>("adamw") || use.template operator()<Adam>("adam") ||
         use.template operator()<SGD>("sgd") || use.template operator()<Lion>("lion") ||
         use.template operator()<Adafactor>("adafactor");
}

} // namespace hasten::detail
