#include "mixed_precision.h"

#include <algorithm>
#include <cmath>

#include <algorithm>
#include <cmath>
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/core/precision_probe.h"
#include "run_context.h"
#include "state/state_contents.h"

namespace hasten::detail {

constexpr const char* kPrecisionWhere = "accelerator::mixed_precision";

MixedPrecision::MixedPrecision(RunContext& run, std::shared_ptr<WindowShared> shared)
    : run_(run), shared_(std::move(shared)), loss_scale_(run.options().grad_scaler) {
  choose(run.options().mixed_precision);
}

// The precision that this rank requests, and whether its device supports it.
static nlohmann::json precision_answer(Precision wanted, const at::Device& device) {
  nlohmann::json mine = {{"wanted", precision_name(wanted)}};
  if (wanted == Precision::automatic) {
    wanted = Precision::bf16;
    if (device.is_cpu()) {
      mine["speedup"] = precision_speedup(at::kBFloat16);
    }
  }
  mine["why_not"] = why_no_precision(wanted, device);
  return mine;
}

static Precision automatic_precision(const std::vector<nlohmann::json>& all) {
  double speedup = INFINITY; // of the CPUs
  std::string why_not;
  for (const auto& rank : all) {
    speedup = std::min(speedup, rank.value("speedup", double{INFINITY}));
    why_not = why_not.empty() ? rank.value("why_not", "") : why_not;
  }
  const bool chosen = why_not.empty() && speedup >= kWorthwhileSpeedup;
  log_info(std::string("precision: ") + (chosen ? "bf16" : "fp32") + ", selected automatically: " +
           (!why_not.empty() ? why_not
            : speedup < INFINITY
                ? "a layer in bf16 is " + format_fixed(speedup, 1) + " times as fast as in fp32"
                : "the device computes bf16 in hardware") +
           (why_not.empty() && all.size() > 1 ? " on every rank" : ""));
  return chosen ? Precision::bf16 : Precision::no;
}

void MixedPrecision::choose(Precision wanted) {
  std::vector<nlohmann::json> all{precision_answer(wanted, run_.device())};
  if (run_.communicator()->world_size() > 1) {
    all = run_.communicator()->all_gather_object(all.front(), "mixed precision");
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto asked = all[rank].at("wanted").get<std::string>();
    if (all[rank].at("wanted") != all[0].at("wanted")) {
      throw InputError(kPrecisionWhere,
                       "rank " + std::to_string(rank) + " requests " + asked +
                           ", rank 0 requests " + all[0].at("wanted").get<std::string>(),
                       "the same mixed_precision on every rank");
    }
    const std::string why_not = all[rank].value("why_not", "");
    if (!why_not.empty() && wanted != Precision::automatic) {
      throw InputError(kPrecisionWhere,
                       std::string("mixed_precision=") + precision_name(wanted) +
                           ": the machine of rank " + std::to_string(rank) +
                           " cannot compute in it: " + why_not,
                       "a precision that every rank supports",
                       run_.device().is_cpu()
                           ? "use fp32, or bf16; `hasten env` shows which are fast on a machine"
                           : "use fp16 (--precision fp16), or fp32");
    }
  }
  precision_ = wanted == Precision::automatic ? automatic_precision(all) : wanted;
  GradScalerOptions scaler = run_.options().grad_scaler;
  scaler.enabled = scaler.enabled && precision_ == Precision::fp16;
  loss_scale_ = LossScale(scaler);
  publish();
}

AutocastOptions MixedPrecision::autocast_options() const {
  return {.device = run_.device().type(),
          .dtype = precision_ == Precision::fp16 ? at::kHalf : at::kBFloat16,
          .fp32_ops = run_.options().fp32_ops};
}

// Note [Autocast in a window]
// Models have no hook before their forward, so the scope begins with the batch. It ends with the
// batch's last backward: later code (optimizers, metrics) runs in fp32, and converted parameters
// are dropped before they change. If a scope of the user still lives, its end restores the state
// from inside the batch. So the end of the guard restores the state from before the batch once
// more.
void MixedPrecision::begin_batch() {
  if (precision_ == Precision::no) {
    return;
  }
  before_batch_ = AutocastState::now();
  batch_cast_.emplace(autocast_options());
}

void MixedPrecision::end_batch(bool batch_closes) noexcept {
  batch_cast_.reset();
  if (batch_closes && before_batch_) {
    before_batch_->restore();
    before_batch_.reset();
  }
}

void MixedPrecision::update(bool overflow) {
  loss_scale_.update(overflow);
  publish();
}

void MixedPrecision::take_smallest() {
  if (!scales()) {
    return;
  }
  const at::Tensor least = at::full({1}, loss_scale_.value(), at::TensorOptions(at::kDouble));
  run_.communicator()->all_reduce(least, ReduceOp::MIN, "loss scale");
  loss_scale_.set_scale(least.item<double>());
  publish();
}

nlohmann::json MixedPrecision::save() const {
  NamedTensors none;
  nlohmann::json values;
  if (scales()) {
    loss_scale_.save_state(none, values);
  }
  return values;
}

void MixedPrecision::load(const nlohmann::json& values) {
  if (scales()) {
    loss_scale_.load_state({}, values);
    publish();
  }
}

void MixedPrecision::add_to(StateToLoad& load, std::function<void()> loaded) {
  if (!scales()) {
    return;
  }
  const bool own = load.same_world && load.own.contains("loss_scale");
  const nlohmann::json& from = own ? load.own : load.shared;
  const auto found = from.find("loss_scale");
  if (found == from.end() || found->is_null()) {
    log_info(
        "the state has no loss scale, because it was not saved with fp16. The scale starts at " +
        std::to_string(run_.options().grad_scaler.init_scale));
    return;
  }
  load.add(own ? load.rank_file : load.state_file(), &loss_scale_, {}, *found);
  load.apply.push_back([this, loaded = std::move(loaded)] {
    publish();
    loaded();
  });
}

} // namespace hasten::detail
