// In which type forwards compute, and the loss scale of fp16: when it is on, who finds
// overflows, and when the scale changes.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/core/precision_probe.h"
#include "hasten/optim/gradient_norm.h"
#include "state_load.h"

namespace hasten {

namespace detail {

constexpr const char* kPrecisionWhere = "accelerator::mixed_precision";

// What this rank asks for, and what its machine says to it.
static nlohmann::json precision_answer(Precision wanted, bool on_cpu) {
  nlohmann::json mine = {{"wanted", precision_name(wanted)}};
  if (!on_cpu) {
    return mine;
  }
  if (wanted == Precision::automatic) {
    mine["speedup"] = precision_speedup(at::kBFloat16);
    wanted = Precision::bf16;
  }
  mine["why_not"] = why_no_precision(wanted);
  return mine;
}

static Precision automatic_precision(const std::vector<nlohmann::json>& all) {
  double speedup = INFINITY;
  bool possible = true;
  for (const auto& rank : all) {
    speedup = std::min(speedup, rank.value("speedup", 2.0));
    possible = possible && rank.value("why_not", "").empty();
  }
  const bool chosen = possible && speedup >= kWorthwhileSpeedup;
  char number[32];
  std::snprintf(number, sizeof number, "%.1f", speedup);
  log_info(std::string("precision: ") + (chosen ? "bf16" : "fp32") +
           ", chosen by itself: a layer in bf16 is " + number + " times as fast as in fp32" +
           (all.size() > 1 ? " on every rank" : ""));
  return chosen ? Precision::bf16 : Precision::no;
}

void AcceleratorCore::choose_precision(Precision wanted) {
  std::vector<nlohmann::json> all{precision_answer(wanted, device.is_cpu())};
  if (communicator->world_size() > 1) {
    all = communicator->all_gather_object(all.front(), "mixed precision");
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto asked = all[rank].at("wanted").get<std::string>();
    if (all[rank].at("wanted") != all[0].at("wanted")) {
      throw InputError(kPrecisionWhere,
                       "rank " + std::to_string(rank) + " asks for " + asked + ", rank 0 for " +
                           all[0].at("wanted").get<std::string>(),
                       "the same mixed_precision on every rank");
    }
    const std::string why_not = all[rank].value("why_not", "");
    if (!why_not.empty() && wanted != Precision::automatic) {
      throw InputError(kPrecisionWhere,
                       std::string("mixed_precision=") + precision_name(wanted) +
                           ": the machine of rank " + std::to_string(rank) +
                           " cannot compute in it: " + why_not,
                       "a precision that every rank has",
                       "use fp32, or bf16; `hasten env` says which are quick where");
    }
  }
  precision_ = wanted == Precision::automatic ? automatic_precision(all) : wanted;
  GradScalerOptions scaler = options.grad_scaler;
  scaler.enabled = scaler.enabled && precision_ == Precision::fp16;
  loss_scale_ = LossScale(scaler);
  publish_loss_scale();
}

void AcceleratorCore::set_precision(Precision wanted) {
  for (const ModelState& model : models_) {
    if (window != nullptr || in_window(model)) {
      throw InputError(kPrecisionWhere, "another precision in the middle of a window",
                       "a call between windows");
    }
  }
  choose_precision(wanted);
}

AutocastOptions AcceleratorCore::autocast_options() const {
  return {.device = device.type(),
          .dtype = precision_ == Precision::fp16 ? at::kHalf : at::kBFloat16,
          .fp32_ops = options.fp32_ops};
}

// Note [Autocast in a window]
// Models have no hook before their forward, so the scope begins with the batch. It
// ends with the batch's last backward: what follows (optimizers, metrics) is in fp32,
// and converted parameters are dropped before they change. A scope of the user's that
// still lives then puts back what was in it when it ends; so the guard's end puts back
// what was before the batch once more.
void AcceleratorCore::begin_autocast() {
  if (precision_ == Precision::no) {
    return;
  }
  before_batch_ = AutocastState::now();
  batch_cast_.emplace(autocast_options());
}

void AcceleratorCore::end_autocast(bool batch_closes) noexcept {
  batch_cast_.reset();
  if (batch_closes && before_batch_) {
    before_batch_->restore();
    before_batch_.reset();
  }
}

bool AcceleratorCore::scales() const { return loss_scale_.options().enabled; }

void AcceleratorCore::publish_loss_scale() { shared_->loss_scale = loss_scale_.value(); }

// Note [Who finds an overflow]
// Gradients are looked at when a window is complete: reduced by a sum, in which an
// infinity of one rank is one on all, so that every rank decides alike without a
// message; hooks that compress keep what is not finite. In a LocalSGD scope each rank
// decides for itself, and its attempted steps are counted all the same. The norm that
// clipping needs answers it for whole models; else a pass that only reads.
bool AcceleratorCore::overflowed(ModelState& model) {
  if (!model.looked) {
    std::vector<at::Tensor> gradients;
    for (const auto& slot : model.parallel->gradients().layout().slots()) {
      const at::Tensor& gradient = slot.parameter.grad();
      if (gradient.defined()) {
        gradients.push_back(gradient.is_sparse() ? gradient._values() : gradient);
      }
    }
    std::vector<double> largest{gradient_norm(gradients, INFINITY)};
    model.parallel->reduce_norms(largest, INFINITY);
    model.overflow = !std::isfinite(largest[0]);
    model.looked = true;
  }
  return model.overflow;
}

void AcceleratorCore::note_norm(const std::vector<SlotList>& lists, double norm) {
  for (const SlotList& list : lists) {
    if (list.all && std::isfinite(norm) && !models_[list.model].looked) {
      models_[list.model].looked = true;
      models_[list.model].overflow = false;
    }
  }
}

// Whether an optimizer over these must not step. The first one of a window also
// decides about the scale, from all models of that window.
bool AcceleratorCore::leaves_out_step(const std::vector<SlotList>& lists, uint64_t complete) {
  if (!scales()) {
    return false;
  }
  if (complete > scaled_serial_) {
    scaled_serial_ = complete;
    bool bad_loss = false;
    bool found = false;
    for (ModelState& model : models_) {
      if (model.completed == complete) {
        bad_loss = bad_loss || model.bad_loss;
        found = overflowed(model) || found;
      }
    }
    if (bad_loss) {
      log_warning(
          "the loss is not finite before it is scaled: no overflow of "
          "gradients, and no scale mends it. The step is left out, the loss scale stays at " +
          std::to_string(loss_scale_.value()) +
          ". Activations above 65504 are infinite in fp16: bf16 has fp32's range");
    } else {
      loss_scale_.update(found);
      publish_loss_scale();
    }
  }
  return std::any_of(lists.begin(), lists.end(), [&](const SlotList& list) {
    return overflowed(models_[list.model]) || models_[list.model].bad_loss;
  });
}

// The ranks of a LocalSGD scope left out steps of their own: they had scales, and
// ticks of schedules, of their own.
void AcceleratorCore::agree_after_local() {
  if (communicator->world_size() == 1) {
    return;
  }
  align_clocks();
  if (!scales()) {
    return;
  }
  const at::Tensor least = at::full({1}, loss_scale_.value(), at::TensorOptions(at::kDouble));
  communicator->all_reduce(least, ReduceOp::MIN, "loss scale");
  loss_scale_.set_scale(least.item<double>());
  publish_loss_scale();
}

nlohmann::json AcceleratorCore::saved_loss_scale() const {
  NamedTensors none;
  nlohmann::json values;
  if (scales()) {
    loss_scale_.save_state(none, values);
  }
  return values;
}

void AcceleratorCore::plan_loss_scale(StateLoad& load) {
  if (!scales()) {
    return;
  }
  const bool own = load.same_world && load.own.contains("loss_scale");
  const nlohmann::json& from = own ? load.own : load.shared;
  const auto found = from.find("loss_scale");
  if (found == from.end() || found->is_null()) {
    log_info("the state has no loss scale: it was not saved with fp16. It begins at " +
             std::to_string(options.grad_scaler.init_scale));
    return;
  }
  load.add(own ? load.rank_file : load.state_file(), &loss_scale_, {}, *found);
  load.apply.push_back([this] {
    publish_loss_scale();
    scaled_serial_ = serial_;
  });
}

} // namespace detail

Precision Accelerator::mixed_precision() const { return core_->precision(); }

void Accelerator::set_mixed_precision(Precision precision) { core_->set_precision(precision); }

Autocast Accelerator::autocast() const {
  if (core_->precision() == Precision::no) {
    return Autocast(AutocastState::now());
  }
  return Autocast(core_->autocast_options());
}

const LossScale& Accelerator::loss_scale() const { return core_->loss_scale(); }

} // namespace hasten
