#include "run_control.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <map>
#include <string>
#include <typeinfo>
#include <utility>

#include "accelerator/accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"

namespace hasten::detail {

uint32_t request_bits(const TrainerControl& control) {
  return (control.should_training_stop ? kRequestStop : 0u) |
         (control.should_save ? kRequestSave : 0u) |
         (control.should_evaluate ? kRequestEvaluate : 0u) |
         (control.should_log ? kRequestLog : 0u);
}

// Callbacks of two ranks correspond if they have the same type and the same number of callbacks of
// that type come before.
void RunControl::compare_callbacks() {
  std::map<std::string, int> of_type;
  nlohmann::json names = nlohmann::json::array();
  for (const auto& callback : parts_.callbacks) {
    const TrainerCallback& object = *callback;
    const std::string type = typeid(object).name();
    names.push_back(type + "#" + std::to_string(of_type[type]++));
  }
  common_.assign(parts_.callbacks.size(), true);
  if (parts_.accelerator->num_processes() == 1) {
    return;
  }
  for (const auto& theirs : parts_.communicator().all_gather_object(names, "callbacks")) {
    for (size_t i = 0; i < names.size(); ++i) {
      common_[i] = common_[i] && std::find(theirs.begin(), theirs.end(), names[i]) != theirs.end();
    }
  }
}

void RunControl::take_controls(bool common) {
  for (size_t i = 0; i < parts_.callbacks.size(); ++i) {
    const TrainerControl control = std::exchange(parts_.callbacks[i]->control(), TrainerControl{});
    const bool alike = common && common_[i] && !control.any_rank;
    ask(request_bits(control), alike);
    if (!control.learning_rate) {
      continue;
    }
    if (!alike) {
      throw InputError(
          "trainer::train",
          "a callback set control().learning_rate=" + std::to_string(*control.learning_rate) +
              (control.any_rank ? " with any_rank"
               : common_[i]     ? " inside a step"
                                : " that not every rank has"),
          "the same rate on every rank, after a step",
          "add the callback on every rank, and set the rate in on_step_end, "
          "on_log, on_evaluate, on_save or on_epoch_end");
    }
    const double rate = *control.learning_rate;
    if (!(rate >= 0) || !std::isfinite(rate)) {
      throw InputError("trainer::train", "control().learning_rate=" + std::to_string(rate),
                       "0 or more");
    }
    scheduler_.set_base_lrs(std::vector(scheduler_.base_lrs().size(), rate));
    own_learning_rate_ = true;
  }
}

void RunControl::ask(uint32_t bits, bool common) {
  if (bits == 0) {
    return;
  }
  if (common) {
    asked_ |= bits;
    stopping_ = stopping_ || (asked_ & kRequestStop) != 0;
  } else {
    parts_.accelerator->core()->windows.shared()->requests |= bits;
  }
}

void RunControl::check_signals() {
  throw_if_interrupted(); // not for SIGTERM if the run can save
  if (interrupt_signal() == SIGTERM && !parts_.arguments.output_dir.empty() &&
      !std::exchange(asked_to_terminate_, true)) {
    ask(kRequestTerminate, false);
  }
}

void RunControl::hear() {
  const uint32_t bits = std::exchange(parts_.accelerator->core()->windows.shared()->heard, 0u);
  terminating_ = terminating_ || (bits & kRequestTerminate) != 0;
  ask(bits & ~kRequestTerminate, true);
}

bool RunControl::take(uint32_t bit) {
  const bool asked = (asked_ & bit) != 0;
  asked_ &= ~bit;
  return asked;
}

} // namespace hasten::detail
