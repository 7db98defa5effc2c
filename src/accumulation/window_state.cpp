// A window's part of a state. It is exact, so that the next batch continues as if without a save.
#include <ATen/ATen.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "hasten/accumulation/gradient_window.h"
#include "hasten/base/error.h"
#include "window_watch.h"

namespace hasten {

GradientWindow::~GradientWindow() = default;

void GradientWindow::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  if ((open_ && !had_backward_) || (begun_ && !complete_ && !outside_ && last_ && had_backward_) ||
      !failure_.empty()) {
    throw InputError(
        "accumulation::GradientWindow",
        !failure_.empty() ? "the state of a batch whose backward threw: " + failure_
                          : "the state between accumulate() and the last backward() of its batch",
        "a state between batches, or after the backward", "save at the end of the loop's body");
  }
  values["steps"] = options_.steps;
  values["outside"] = outside_;
  values["outside_sums"] = outside_sums_;
  values["begun"] = begun_;
  values["complete"] = complete_;
  values["idle"] = idle_;
  values["batches"] = batches_ + (open_ ? 1 : 0);
  values["number"] = report_.number;
  values["rows"] = report_.rows;
  values["non_finite"] = std::llround(report_.non_finite);
  // JSON has neither NaN nor infinity, which a loss may be.
  tensors["numbers"] = at::tensor({scale_, next_scale_, factor_, weight_, rows_, report_.weight,
                                   report_.loss.item(), loss_scale_},
                                  at::kDouble);
  double losses = host_losses_;
  double non_finite = host_non_finite_;
  if (device_losses_.defined()) {
    losses = device_losses_.item<double>();
    non_finite = std::isfinite(losses) ? 0 : 1;
  }
  tensors["loss_stats"] = at::tensor({losses, non_finite}, at::kDouble);
}

void GradientWindow::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  const auto refuse = [](const std::string& what, const std::string& expected) {
    throw InputError("accumulation::GradientWindow", what, expected);
  };
  const auto numbers = tensors.find("numbers");
  const auto stats = tensors.find("loss_stats");
  const bool begun = values.at("begun").get<bool>();
  const bool complete = values.at("complete").get<bool>();
  const bool outside = values.at("outside").get<bool>();
  const auto steps = values.at("steps").get<int64_t>();
  const auto batches = values.at("batches").get<int64_t>();
  if (begun && !complete && steps != options_.steps && !outside) {
    refuse("the state is in the middle of a window of gradient_accumulation_steps=" +
               std::to_string(steps) + " batches",
           "the same number, here it is " + std::to_string(options_.steps));
  }
  const auto is_doubles = [](const at::Tensor& tensor, int64_t count) {
    return tensor.scalar_type() == at::kDouble && tensor.numel() == count;
  };
  if (numbers == tensors.end() || !is_doubles(numbers->second, 8) ||
      (stats != tensors.end() && !is_doubles(stats->second, 2)) ||
      (begun && stats == tensors.end())) {
    refuse("the state lacks the window's values", "what save_state() wrote");
  }
  WindowReport report;
  values.at("number").get_to(report.number);
  values.at("rows").get_to(report.rows);
  report.non_finite = values.at("non_finite").get<double>();

  const at::Tensor host = numbers->second.cpu().contiguous();
  const double* number = host.const_data_ptr<double>();
  scale_ = number[0];
  next_scale_ = number[1];
  factor_ = number[2];
  weight_ = number[3];
  rows_ = number[4];
  report.weight = number[5];
  report.loss = number[6];
  loss_scale_ = number[7];
  report_ = report;
  forget_losses();
  if (stats != tensors.end()) {
    const at::Tensor sums = stats->second.cpu().contiguous();
    if (device_.is_cpu()) {
      host_losses_ = sums.const_data_ptr<double>()[0];
      host_non_finite_ = sums.const_data_ptr<double>()[1];
    } else {
      device_losses_ = sums.narrow(0, 0, 1).to(device_);
    }
  }
  watch_->forget();
  begun_ = begun;
  complete_ = complete;
  outside_ = outside;
  outside_sums_ = values.at("outside_sums").get<bool>();
  batches_ = batches;
  idle_ = values.value("idle", false);
  open_ = last_ = had_backward_ = false;
  used_weight_.reset();
  failure_.clear();
}

} // namespace hasten
