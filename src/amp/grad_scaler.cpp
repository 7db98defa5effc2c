#include "hasten/amp/grad_scaler.h"

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/autocast.h"
#include "hasten/optim/fused_optimizer.h"
#include "hasten/optim/gradient_norm.h"

namespace hasten {

namespace detail {

/// Defined gradients of all groups; that of a tied parameter once.
static std::vector<at::Tensor> gradients_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> gradients;
  std::unordered_set<const void*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
        gradients.push_back(parameter.grad());
      }
    }
  }
  return gradients;
}

static at::Tensor numbers_in(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

static void multiply(const std::vector<at::Tensor>& gradients, double factor) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& gradient : gradients) {
    numbers_in(gradient).mul_(factor);
  }
}

[[noreturn]] static void refuse_again(const char* where, const char* what, const char* fix) {
  throw InputError(where, what, "one call per optimizer between two calls of update()", fix);
}

} // namespace detail

GradScaler::GradScaler(GradScalerOptions options, std::shared_ptr<Communicator> communicator)
    : scale_(options), communicator_(std::move(communicator)) {}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!loss.defined() || !loss.is_floating_point()) {
    throw InputError("amp::GradScaler::scale",
                     loss.defined()
                         ? std::string("loss of type ") + c10::toString(loss.scalar_type())
                         : "loss=undefined",
                     "a floating-point tensor");
  }
  if (!is_enabled()) {
    return loss;
  }
  if (loss.is_cpu() && !loss.detach().isfinite().all().item<bool>()) {
    throw TrainingError(
        "amp::GradScaler::scale",
        "the loss is not finite before scaling" +
            (loss.numel() == 1 ? ": loss=" + std::to_string(loss.item<double>()) : std::string()) +
            ". A lower loss scale cannot help",
        "a finite loss",
        "lower the learning rate, look for samples that the model cannot handle or for "
        "activations above 65504, the largest number of fp16, or use bf16, which has fp32's range");
  }
  const at::Tensor wide = loss.scalar_type() == at::kDouble ? loss : loss.to(at::kFloat);
  return wide * get_scale();
}

GradScaler::Progress& GradScaler::begin(torch::optim::Optimizer& optimizer, const char* where) {
  Progress& progress = progress_[&optimizer];
  if (progress.stepped) {
    detail::refuse_again(where, "the optimizer has stepped since the last update()",
                         "call update() after step(), before the next backward");
  }
  return progress;
}

void GradScaler::check(torch::optim::Optimizer& optimizer, Progress& progress) {
  std::vector<at::Tensor> numbers = detail::gradients_of(optimizer);
  std::transform(numbers.begin(), numbers.end(), numbers.begin(), detail::numbers_in);
  progress.found_inf = !std::isfinite(gradient_norm(numbers, INFINITY));
  if (communicator_ && communicator_->world_size() > 1) {
    at::Tensor found = at::full({1}, progress.found_inf ? 1.0 : 0.0, at::kDouble);
    communicator_->all_reduce(found, ReduceOp::MAX, "found_inf");
    progress.found_inf = found.item<double>() > 0;
  }
  progress.checked = true;
  progress.factor = 1 / get_scale();
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  const char* where = "amp::GradScaler::unscale_";
  Progress& progress = begin(optimizer, where);
  if (!is_enabled()) {
    return;
  }
  if (progress.checked) {
    detail::refuse_again(where, "the gradients are divided by the scale already",
                         "call it once, just before what reads the gradients");
  }
  check(optimizer, progress);
  detail::multiply(detail::gradients_of(optimizer), progress.factor);
  progress.factor = 1;
}

double GradScaler::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm) {
  const char* where = "amp::GradScaler::clip_grad_norm_";
  if (!(max_norm > 0)) {
    throw InputError(where, "max_norm=" + std::to_string(max_norm), "a number above 0");
  }
  Progress& progress = begin(optimizer, where);
  if (progress.checked) {
    detail::refuse_again(where, "the gradients are divided by the scale already",
                         "call clip_grad_norm_ instead of unscale_, once");
  }
  const auto gradients = detail::gradients_of(optimizer);
  const double raw = gradient_norm(gradients, 2);
  const double factor = 1 / get_scale();
  const double norm = raw * factor;
  if (is_enabled()) {
    check(optimizer, progress);
  } else {
    progress.checked = true;
    progress.factor = factor;
  }
  const double clipped = max_norm / (norm + 1e-6); // as torch.nn.utils does
  if (!(clipped >= 1)) {
    progress.factor *= clipped;
  }
  if (dynamic_cast<FusedOptimizer*>(&optimizer) == nullptr) {
    detail::multiply(gradients, progress.factor);
    progress.factor = 1;
  }
  return norm;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  Progress& progress = begin(optimizer, "amp::GradScaler::step");
  if (is_enabled() && !progress.checked) {
    check(optimizer, progress);
  }
  progress.stepped = true;
  if (progress.found_inf) {
    return false;
  }
  if (auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer)) {
    fused->step_scaled(progress.factor);
  } else {
    if (progress.factor != 1) {
      detail::multiply(detail::gradients_of(optimizer), progress.factor);
    }
    optimizer.step();
  }
  drop_autocast_casts();
  return true;
}

void GradScaler::update() {
  if (is_enabled() && progress_.empty()) {
    throw InputError("amp::GradScaler::update",
                     "no optimizer was unscaled or stepped since the last update()",
                     "step() before update()");
  }
  scale_.update(std::any_of(progress_.begin(), progress_.end(),
                            [](const auto& optimizer) { return optimizer.second.found_inf; }));
  progress_.clear();
}

void GradScaler::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  scale_.save_state(tensors, values);
}

void GradScaler::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  scale_.load_state(tensors, values);
  progress_.clear();
}

} // namespace hasten
