// What callbacks and signals ask of a run, and how ranks come to do it together.
//
// What every rank asks alike (a callback that decides from the values it is given) is
// done at once. What one rank alone may ask (a signal, a clock, a callback that the
// others do not have) goes with its next window to all ranks, which all do it behind
// that update; with Local SGD, whose windows stay at home, at the next round.

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <map>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "training_run.h"

namespace hasten::detail {

bool TrainerParts::terminates() const {
  return saves_when_terminated && interrupt_signal() == SIGTERM;
}

void TrainerParts::throw_if_interrupted() const {
  if (!terminates()) {
    hasten::throw_if_interrupted();
  }
}

uint32_t request_bits(const TrainerControl& control) {
  return (control.should_training_stop ? kRequestStop : 0u) |
         (control.should_save ? kRequestSave : 0u) |
         (control.should_evaluate ? kRequestEvaluate : 0u) |
         (control.should_log ? kRequestLog : 0u);
}

// Callbacks are the same on two ranks where they have one type, and as many of it
// come before.
void TrainingRun::compare_callbacks() {
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

void TrainingRun::take_controls(bool common) {
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
               : common_[i]     ? " inside an update"
                                : " that not every rank has"),
          "the same rate on every rank, behind an update",
          "add the callback on every rank, and set the rate in on_step_end, "
          "on_log, on_evaluate, on_save or on_epoch_end");
    }
    set_learning_rate(*control.learning_rate);
  }
}

void TrainingRun::ask(uint32_t bits, bool common) {
  if (bits == 0) {
    return;
  }
  if (common) {
    asked_ |= bits;
    stopping_ = stopping_ || (asked_ & kRequestStop) != 0;
  } else if (is_local()) {
    unheard_ |= bits;
  } else {
    parts_.accelerator->request(bits);
  }
}

void TrainingRun::set_learning_rate(double learning_rate) {
  if (!(learning_rate >= 0) || !std::isfinite(learning_rate)) {
    throw InputError("trainer::train", "control().learning_rate=" + std::to_string(learning_rate),
                     "0 or more");
  }
  lr_scheduler_->set_base_lrs(std::vector<double>(lr_scheduler_->base_lrs().size(), learning_rate));
  next_learning_rate_ = lr_scheduler_->get_last_lr().at(0);
  own_learning_rate_ = true;
}

StepProgress TrainingRun::step_progress() const {
  return {state_.global_step, plan_.max_steps, state_.epoch,
          state_.global_step > 0 ? seconds_left() : 0};
}

void TrainingRun::heed_signals() {
  parts_.throw_if_interrupted();
  if (parts_.terminates() && !std::exchange(asked_to_terminate_, true)) {
    ask(kRequestTerminate, false);
  }
}

void TrainingRun::agree_on_requests(bool epoch_ended) {
  if (!is_local() || (!epoch_ended && state_.global_step % parts_.arguments.local_sgd_steps != 0)) {
    return;
  }
  at::Tensor counts = at::zeros({kWindowRequests}, at::kDouble);
  for (int bit = 0; bit < kWindowRequests; ++bit) {
    counts[bit] = static_cast<double>((unheard_ >> bit) & 1u);
  }
  unheard_ = 0;
  counts = parts_.accelerator->reduce(counts.to(parts_.accelerator->device())).cpu();
  uint32_t heard = 0;
  for (int bit = 0; bit < kWindowRequests; ++bit) {
    heard |= counts[bit].item<double>() > 0 ? 1u << bit : 0u;
  }
  terminating_ = terminating_ || (heard & kRequestTerminate) != 0;
  ask(heard & ~kRequestTerminate, true);
}

void TrainingRun::terminate() {
  if (local_sgd_) {
    local_sgd_->synchronize();
    collect_losses();
  }
  save_checkpoint();
  terminated_ = true;
  if (local_sgd_) {
    local_sgd_->abort(); // it was averaged above
  }
  if (parts_.is_main()) {
    log_info("SIGTERM: saved behind update " + std::to_string(state_.global_step) + " of " +
             std::to_string(plan_.max_steps) + " in " +
             (output_dir_ / ("checkpoint-" + std::to_string(state_.global_step))).string());
  }
  try {
    // No rank closes the group before all are here.
    parts_.communicator().barrier("stopping at SIGTERM");
  } catch (const CommunicationError&) {
    // A peer went first. All has been saved.
  }
}

} // namespace hasten::detail
