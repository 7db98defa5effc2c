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
    const at::Tensor parameters = stacked(t.parameters); // [tensor, ...], as all below
    const at::Tensor gradients = stacked(t.gradients);
    const auto rms = [](const at::Tensor& x) {
      return x.square().reshape({x.size(0), -1}).mean(1).sqrt_().view(per_tensor(x));
    };
    at::Tensor rate = at::full({}, k.lr, parameters.options());
    if (k.scale_parameter) {
      rate = rms(parameters).clamp_min_(k.eps_scale).mul_(rate);
    }
    at::Tensor update = gradients.square().add_(k.eps);
    if (parameters.dim() > 2) {
      const at::Tensor row = decay(t.moments[0], update.mean(-1), k.beta2);
      const at::Tensor column = decay(t.moments[1], update.mean(-2), k.beta2);
      update = (row / row.mean(-1, true)).rsqrt_().unsqueeze(-1) * column.unsqueeze(-2).rsqrt();
      update.mul_(gradients);
    } else {
      update = decay(t.moments[0], update, k.beta2).rsqrt().mul_(gradients);
    }
    update.div_((rms(update).div_(k.clip_threshold)).clamp_min_(1)).mul_(rate);
    if (!t.moments[2].empty()) {
      update = decay(t.moments[2], update, k.beta1);
    }
    if (k.weight_decay != 0) {
      update = update + parameters * (rate * k.weight_decay);
    }
    t.descend(update.unbind(), 1);
  }

 private:
  /// A copy, or a view of one tensor alone.
  static at::Tensor stacked(const std::vector<at::Tensor>& tensors) {
    return tensors.size() == 1 ? tensors[0].unsqueeze(0) : at::stack(tensors);
  }
  static std::vector<int64_t> per_tensor(const at::Tensor& x) {
    std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
    shape[0] = x.size(0);
    return shape;
  }
  /// Moves the means towards `value`, [tensor, ...], and returns them stacked.
  static at::Tensor decay(const std::vector<at::Tensor>& means, const at::Tensor& value,
                          double beta) {
    at::_foreach_mul_(means, beta);
    at::_foreach_add_(means, value.unbind(), 1 - beta);
    return stacked(means);
  }
};

template class SteppedByEngine<torch::optim::Optimizer, AdafactorOptions, AdafactorParamState>;

} // namespace hasten::detail
