// The training step. What it computes, whatever the number of ranks R and of
// micro-batches a window holds:
//
//   L   = sum of loss_sum / W      over all micro-batches of all ranks,
//   W   = sum of weight            over the same,
//   g   = dL/dp                    equal on every rank,
//   g  <- g * min(1, max_grad_norm / (|g| + 1e-6)),
//   p  <- AdamW(p, g, lr(k)),      k = updates done before this one.
//
// With local_sgd_steps = H sums are over this rank's micro-batches alone, and after
// every H updates p becomes the ranks' mean.
//
// The accelerator's window does the sums and the reduction while backward runs;
// micro-batches before the last add to g and communicate nothing.

#include <ATen/ATen.h>

#include <cmath>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "training_run.h"

namespace hasten::detail {

void require_loss(const LossOutput& loss) {
  if (!loss.loss_sum.defined() || !loss.loss_sum.requires_grad()) {
    throw InputError(
        "trainer::train",
        loss.loss_sum.defined() ? "loss_sum has no graph: requires_grad=false"
                                : "loss_sum=undefined",
        "the sum of the loss over the batch, computed from parameters that "
        "are trained",
        "give labels to the training data, and leave some parameters unfrozen");
  }
}

bool TrainingRun::train_step(const Batch& batch) {
  // A remembered Ctrl-C stops this rank here and, by the failure it posts, the
  // others in their next collective.
  throw_if_interrupted();
  Accelerator& accelerator = *parts_.accelerator;
  auto window = accelerator.accumulate(*loader_, parts_.model);
  try {
    const LossOutput loss = parts_.loss_function(batch);
    require_loss(loss);
    window_loss_.add_(loss.loss_sum.detach());
    accelerator.backward(loss.loss_sum, loss.weight);
    if (!accelerator.sync_gradients()) {
      return false;
    }

    // From here on all ranks hold the same gradients.
    const WindowReport& report = accelerator.last_window();
    if (report.non_finite > 0 || !std::isfinite(report.loss)) {
      stop_at_loss(report);
    }
    if (parts_.arguments.max_grad_norm > 0) {
      grad_norm_ = accelerator.clip_grad_norm_(
          parts_.model, parts_.arguments.max_grad_norm);
      if (!std::isfinite(grad_norm_)) {
        stop_at_gradient();
      }
    }
    optimizer_->step();
    scheduler_->step();
    optimizer_->zero_grad();
    if (local_sgd_) {
      local_sgd_->step();
    }
    window_loss_.zero_();
    return true;
  } catch (const std::exception& error) {
    // Before the guard does, because here the reason is known.
    parts_.communicator().abandon(error.what());
    throw;
  }
}

void TrainingRun::stop_at_loss(const WindowReport& window) {
  const double mine = window_loss_.item<double>();
  std::string who;
  const auto blame = [&](size_t rank, const std::string& loss) {
    who += (who.empty() ? "rank " : ", rank ") + std::to_string(rank) +
           " (loss=" + loss + ")";
  };
  if (window.joined > 0 || is_local()) {
    // Ranks without a row in this window wait in it and cannot answer, those of
    // Local SGD are elsewhere; they learn from the failure that is posted.
    if (!std::isfinite(mine)) {
      blame(parts_.accelerator->process_index(), std::to_string(mine));
    }
  } else {
    // Every rank is here; which of them are to blame they know themselves.
    Communicator& communicator = parts_.communicator();
    const auto losses = communicator.gather_json(
        {{"finite", std::isfinite(mine)}, {"loss", std::to_string(mine)}},
        "ranks whose loss is not finite");
    for (size_t rank = 0; rank < losses.size(); ++rank) {
      if (!losses[rank].at("finite").get<bool>()) {
        blame(rank, losses[rank].at("loss").get<std::string>());
      }
    }
    try {
      // No rank closes the group before all have their answer.
      communicator.barrier("stopping at a loss that is not finite");
    } catch (const CommunicationError&) {
      // A peer went first. This rank knows all it needs.
    }
  }
  throw TrainingError(
      "trainer::train",
      "the loss is not finite in update " +
          std::to_string(state_.global_step + 1) + " of " +
          std::to_string(plan_.max_steps) + ", on " +
          (who.empty() ? "another rank, or only in the sum" : who),
      "a finite loss",
      "lower learning_rate, lengthen the warm-up, or look for rows the model "
      "cannot take; the parameters are as they were before this update");
}

void TrainingRun::stop_at_gradient() const {
  throw TrainingError(
      "trainer::train",
      "the gradient is not finite in update " +
          std::to_string(state_.global_step + 1) + " of " +
          std::to_string(plan_.max_steps) +
          ": grad_norm=" + std::to_string(grad_norm_) +
          (is_local() ? " on this rank" : " on every rank"),
      "a finite gradient of a finite loss",
      "lower learning_rate, or look for operations whose derivative overflows");
}

} // namespace hasten::detail
