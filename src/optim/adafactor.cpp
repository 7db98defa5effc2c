#include "hasten/optim/adafactor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "step_options.h"

namespace hasten::detail {

template <>
class Rules<AdafactorOptions> final : public RulesOf<AdafactorOptions> {
 public:
  Rules()
      : RulesOf({"optim::Adafactor", adafactor_step, /*by_elements=*/false, /*by_rows=*/true}) {}
  void check_own(const AdafactorOptions& options) const override {
    const auto [eps, least_rms] = options.eps();
    require_option(eps > 0 && std::isfinite(eps), where(), "eps[0]", eps, "above 0");
    require_not_negative(where(), "eps[1]", least_rms);
    require_option(options.clip_threshold() > 0, where(), "clip_threshold",
                   options.clip_threshold(), "above 0");
    require_option(options.decay_rate() < 0 && std::isfinite(options.decay_rate()), where(),
                   "decay_rate", options.decay_rate(), "below 0");
    if (options.beta1()) {
      require_beta(where(), "beta1", *options.beta1());
    }
    if (options.warmup_init() && !options.relative_step()) {
      throw InputError(where(), "warmup_init=true with relative_step=false", "both or neither");
    }
  }
  StateParts parts(const at::Tensor& parameter, std::unique_ptr<State>& slot) const override {
    auto& state = state_in<AdafactorParamState>(slot);
    return {&state.step(),
            &state.master(),
            {parameter.dim() >= 2 ? &state.exp_avg_sq_row() : &state.exp_avg_sq(),
             &state.exp_avg_sq_col(), &state.exp_avg()}};
  }
  at::Tensor make_moment(int which, const at::Tensor& parameter, const Options& options,
                         at::ScalarType dtype) const override {
    if (which == 2) {
      return own(options).beta1() ? at::zeros_like(parameter, dtype) : at::Tensor();
    }
    auto shape = parameter.sizes().vec();
    if (shape.size() >= 2) {
      shape.erase(which == 0 ? shape.end() - 1 : shape.end() - 2);
    } else if (which == 1) {
      return {};
    }
    return at::zeros(shape, parameter.options().dtype(dtype));
  }
  StepNumbers numbers(const Options& options, int64_t step, bool) const override {
    const AdafactorOptions& o = own(options);
    const auto k = static_cast<double>(step);
    StepNumbers numbers;
    numbers.lr = o.lr();
    if (o.relative_step()) {
      numbers.lr = std::min(o.warmup_init() ? 1e-6 * k : 1e-2, 1 / std::sqrt(k));
    }
    numbers.weight_decay = o.weight_decay();
    numbers.keep = 1 - o.weight_decay(); // the kernel applies the learning rate
    numbers.beta1 = o.beta1().value_or(0);
    numbers.beta2 = 1 - std::pow(k, o.decay_rate());
    std::tie(numbers.eps, numbers.eps_scale) = o.eps();
    numbers.clip_threshold = o.clip_threshold();
    numbers.scale_parameter = o.scale_parameter();
    return numbers;
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    std::vector<at::Tensor> directions;
    for (size_t i = 0; i < t.parameters.size(); ++i) {
      const Direction direction = direction_of(t, i, k);
      if (t.found_inf) {
        directions.push_back(direction.update + direction.decay);
      } else {
        t.parameters[i].sub_(direction.decay).sub_(direction.update);
      }
    }
    if (t.found_inf) {
      t.descend(directions, 1);
    }
  }

 private:
  struct Direction {
    at::Tensor update, decay;
  };
  static Direction direction_of(StepTensors& t, size_t i, const StepNumbers& k) {
    const at::Tensor& parameter = t.parameters[i];
    const at::Tensor& gradient = t.gradients[i];
    const auto rms = [](const at::Tensor& x) {
      return x.norm() / std::sqrt(static_cast<double>(x.numel()));
    };
    at::Tensor rate = at::full({}, k.lr, parameter.options());
    if (k.scale_parameter) {
      rate = rate * rms(parameter).clamp_min(k.eps_scale);
    }
    at::Tensor update = gradient.square().add_(k.eps);
    const at::Tensor& row = t.moments[0][i];
    if (parameter.dim() >= 2) {
      const at::Tensor& column = t.moments[1][i];
      row.mul_(k.beta2).add_(update.mean(-1), 1 - k.beta2);
      column.mul_(k.beta2).add_(update.mean(-2), 1 - k.beta2);
      update = (row / row.mean(-1, true)).rsqrt_().unsqueeze(-1) * column.unsqueeze(-2).rsqrt();
      update.mul_(gradient);
    } else {
      row.mul_(k.beta2).add_(update, 1 - k.beta2);
      update = row.rsqrt().mul_(gradient);
    }
    update.div_((rms(update) / k.clip_threshold).clamp_min(1)).mul_(rate);
    if (!t.moments[2].empty()) {
      const at::Tensor& mean = t.moments[2][i];
      mean.mul_(k.beta1).add_(update, 1 - k.beta1);
      update = mean;
    }
    return {update, parameter * (rate * k.weight_decay)};
  }
};

template class SteppedByEngine<torch::optim::Optimizer, AdafactorOptions, AdafactorParamState>;

} // namespace hasten::detail
