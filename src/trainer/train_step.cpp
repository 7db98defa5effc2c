// The training step. For any number of ranks and of micro-batches per window it computes:
//
//   L   = sum of loss_sum / W      over all micro-batches of all ranks,
//   W   = sum of weight            over the same,
//   g   = dL/dp                    equal on every rank,
//   g  <- g * min(1, max_grad_norm / (|g| + 1e-6)),
//   g  <- each element clipped to max_grad_value, if that is above 0,
//   p  <- AdamW(p, g, lr(k)),      k = steps done before this one.
//
// With local_sgd_steps = H, sums are over this rank's micro-batches only, and after every H
// steps p becomes the ranks' mean.
//
// The accelerator's window sums and reduces while backward runs. Micro-batches before the last
// add to g and communicate nothing.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/optim/fused_optimizer.h"
#include "run_control.h"
#include "train_step.h"

namespace hasten::detail {

void require_loss(const LossOutput& loss) {
  if (!loss.loss_sum.defined() || !loss.loss_sum.requires_grad()) {
    throw InputError(
        "trainer::train",
        loss.loss_sum.defined() ? "loss_sum has no graph: requires_grad=false"
                                : "loss_sum=undefined",
        "the sum of the loss over the batch, computed from trainable parameters",
        "check that the training data has labels and that some parameters are not frozen");
  }
}

double norm_type_of(GradNormType type) {
  return parse_number<double>(spelling(type)).value(); // "1", "2" or "inf"
}

TrainStep::TrainStep(TrainerParts& parts, const TrainingPlan& plan, RunControl& control,
                     Handles handles)
    : parts_(parts), plan_(plan), control_(control), handles_(std::move(handles)) {
  if (parts.arguments.cuda_graphs) {
    graphs_.emplace(parts.loss_function, parts.model, parts.accelerator->device());
  }
  auto* fused = dynamic_cast<FusedOptimizer*>(&*handles_.optimizer);
  if (!reads_at_once() && fused != nullptr) {
    found_inf_ = at::zeros({1}, at::TensorOptions(parts.accelerator->device()).dtype(at::kFloat));
    one_ = at::ones_like(found_inf_);
    fused->set_found_inf(found_inf_);
  }
}

bool TrainStep::run(const Batch& batch, const StepProgress& before) {
  // A remembered Ctrl-C stops this rank here and, by the failure it posts, the
  // others in their next collective.
  control_.check_signals();
  if (!std::exchange(window_open_, true)) {
    control_.notify([&](TrainerCallback& c) { c.on_step_begin(before); }, false);
  }
  Accelerator& accelerator = *parts_.accelerator;
  auto window = accelerator.accumulate(handles_.loader, parts_.model);
  try {
    const LossOutput loss = graphs_ ? (*graphs_)(batch) : parts_.loss_function(batch);
    require_loss(loss);
    const at::Tensor own_loss = loss.loss_sum.detach().to(
        loss.loss_sum.is_cpu() ? at::kDouble : at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    window_loss_ = window_loss_.defined() ? window_loss_ + own_loss : own_loss;
    accelerator.backward(loss.loss_sum, loss.weight);
    if (!accelerator.sync_gradients()) {
      control_.notify([&](TrainerCallback& c) { c.on_substep_end(before); }, false);
      return false;
    }

    // From here on all ranks hold the same gradients.
    const bool on_cpu = accelerator.device().is_cpu();
    if (on_cpu) {
      check_loss();
    }
    note_gradient_norms();
    clip_gradients();
    leave_out_if_not_finite();
    control_.notify([&](TrainerCallback& c) { c.on_pre_optimizer_step(before); }, false);
    if (handles_.optimizer.step().was_skipped()) { // then the schedule does not step, either
      note_overflow();
    }
    if (!on_cpu && scales_losses()) { // the optimizer has read it
      check_loss();
    }
    control_.notify([&](TrainerCallback& c) { c.on_optimizer_step(before); }, false);
    handles_.scheduler.step();
    handles_.optimizer.zero_grad();
    if (local_sgd_) {
      local_sgd_->step();
    }
    return true;
  } catch (const std::exception& error) {
    // Before the guard aborts, because the reason is known here.
    parts_.communicator().abort(error);
    throw;
  }
}

void TrainStep::counted(int64_t step, const WindowReport& window) {
  window_open_ = false;
  pending_steps_.push_back(
      {step, window, DeviceScalar(window_loss_), std::exchange(unchecked_norm_, {})});
  window_loss_.reset();
}

std::vector<WindowReport> TrainStep::take_windows() {
  std::vector<WindowReport> windows;
  for (const PendingStep& next : std::exchange(pending_steps_, {})) {
    check_loss(next);
    if (!std::isfinite(next.grad_norm)) {
      stop_at_gradient(next.step, next.grad_norm);
    }
    windows.push_back(next.window);
  }
  return windows;
}

void TrainStep::check_loss(const PendingStep& of) {
  const double loss = of.window.loss; // reads all that are unread
  parts_.communicator().check("loss"); // they are undefined after the loss of a rank
  if (of.window.non_finite > 0 || !std::isfinite(loss)) {
    stop_at_loss(of.step, of.own_loss);
  }
}

void TrainStep::check_loss() {
  check_loss({parts_.state.global_step + 1, parts_.accelerator->last_window(),
              DeviceScalar(window_loss_), 0});
}

void TrainStep::leave_out_if_not_finite() {
  if (!found_inf_.defined()) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const DeviceScalar& value : {parts_.accelerator->last_window().loss, unchecked_norm_}) {
    if (value.tensor().defined()) {
      values.push_back(value.tensor());
    }
  }
  // torch's check in a GradScaler. one_ leaves the values as they are.
  at::_amp_foreach_non_finite_check_and_unscale_(values, found_inf_, one_);
}

void TrainStep::stop_at_loss(int64_t step, double mine) {
  std::string who;
  const auto blame = [&](size_t rank, const std::string& loss) {
    who += (who.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (loss=" + loss + ")";
  };
  if (is_local()) {
    // The other ranks are not here. The failure that is posted informs them.
    if (!std::isfinite(mine)) {
      blame(parts_.accelerator->process_index(), std::to_string(mine));
    }
  } else {
    // Every rank is here, and each knows whether its own loss is the cause.
    Communicator& communicator = parts_.communicator();
    const auto losses = communicator.all_gather_object(
        {{"finite", std::isfinite(mine)}, {"loss", std::to_string(mine)}},
        "ranks whose loss is not finite");
    for (size_t rank = 0; rank < losses.size(); ++rank) {
      if (!losses[rank].at("finite").get<bool>()) {
        blame(rank, losses[rank].at("loss").get<std::string>());
      }
    }
  }
  meet_before_stopping();
  throw TrainingError("trainer::train",
                      "the loss is not finite in step " + std::to_string(step) + " of " +
                          std::to_string(plan_.max_steps) + ", on " +
                          (who.empty() ? "another rank, or only in the sum" : who),
                      "a finite loss",
                      "lower learning_rate, lengthen the warm-up, or look for bad samples; "
                      "the parameters are those before this step");
}

// No rank fails, which ends the others' operations, before all know why.
void TrainStep::meet_before_stopping() const {
  try {
    if (!is_local()) {
      parts_.communicator().barrier("stopping at a value that is not finite");
    }
  } catch (const CommunicationError&) {
    // A peer ended first. This rank has all it needs.
  }
}

void TrainStep::note_gradient_norms() {
  gradient_norms_ = {};
  const LogGradientNorms what = parts_.arguments.log_gradient_norms;
  if (what == LogGradientNorms::no || !record_due(parts_.state.global_step + 1) ||
      parts_.accelerator->last_window().weight == 0) { // with Local SGD
    return;
  }
  GradientNormsOptions options;
  options.norm_type = norm_type_of(parts_.arguments.grad_norm_type);
  options.of = what == LogGradientNorms::layer    ? NormsOf::layer
               : what == LogGradientNorms::module ? NormsOf::module
                                                  : NormsOf::parameter;
  gradient_norms_ = parts_.accelerator->gradient_norms(parts_.model, options);
}

void TrainStep::clip_gradients() {
  const TrainingArguments& a = parts_.arguments;
  Accelerator& accelerator = *parts_.accelerator;
  const bool refuse = accelerator.device().is_cpu() && !scales_losses();
  try {
    if (a.max_grad_norm > 0) {
      unchecked_norm_ = grad_norm_ = accelerator.clip_grad_norm_(
          parts_.model, a.max_grad_norm, norm_type_of(a.grad_norm_type), refuse);
    }
    if (a.max_grad_value > 0) { // NaN after a norm that was not finite
      unchecked_norm_ = accelerator.clip_grad_value_(parts_.model, a.max_grad_value, refuse);
    }
    if (scales_losses()) { // an overflow is no error
      unchecked_norm_ = 0;
    }
  } catch (const TrainingError&) {
    stop_at_gradient(parts_.state.global_step + 1);
  }
}

bool TrainStep::scales_losses() const {
  return parts_.accelerator->mixed_precision() == Precision::fp16;
}

// A scale that is too large is lowered within a few steps. Gradients that overflow with a scale
// near 0 are not the scale's fault.
void TrainStep::note_overflow() {
  ++overflows_;
  if (parts_.accelerator->loss_scale().value() < 1.0 / 16) {
    stop_at_gradient(parts_.state.global_step + 1);
  }
}

// A gradient of an earlier step is gone. abs(), because some devices' NaN has a sign.
void TrainStep::stop_at_gradient(int64_t step, std::optional<double> earlier) const {
  parts_.communicator().check("gradient norm");
  GradientNorms norms{.total = earlier.value_or(0)};
  if (!earlier) {
    norms = parts_.accelerator->gradient_norms(
        parts_.model,
        {.norm_type = norm_type_of(parts_.arguments.grad_norm_type), .of = NormsOf::parameter});
  }
  meet_before_stopping();
  throw TrainingError(
      "trainer::train",
      "the gradient is not finite in step " + std::to_string(step) + " of " +
          std::to_string(plan_.max_steps) + ": grad_norm=" + std::to_string(std::abs(norms.total)) +
          (scales_losses()
               ? " with loss_scale=" + std::to_string(parts_.accelerator->loss_scale().value())
               : "") +
          (is_local() ? " on this rank" : " on every rank") +
          (earlier                 ? std::string()
           : norms.non_finite == 0 ? ", although each parameter's norm is finite"
                                   : ", first in " + norms.first_non_finite + ", in " +
                                         std::to_string(norms.non_finite) + " of " +
                                         std::to_string(norms.names.size()) + " parameters"),
      "a finite gradient",
      "lower learning_rate, or look for operations whose derivative overflows");
}

} // namespace hasten::detail
