#include "hasten/optim/lamb.h"

#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <utility>

#include "step_options.h"

namespace hasten {

namespace detail {

template <>
class Rules<LambOptions> final : public RulesOf<LambOptions> {
 public:
  Rules() : RulesOf({"optim::Lamb", lamb_step, /*by_elements=*/false}) {}
  StateParts parts(const at::Tensor&, std::unique_ptr<State>& slot) const override {
    auto& state = state_in<LambParamState>(slot);
    return {&state.step(), &state.master(), {&state.exp_avg(), &state.exp_avg_sq()}};
  }
  StepNumbers numbers(const Options& options, int64_t step, bool) const override {
    const LambOptions& o = own(options);
    const auto k = static_cast<double>(step);
    StepNumbers numbers;
    numbers.lr = o.lr();
    std::tie(numbers.beta1, numbers.beta2) = o.betas();
    numbers.l2 = o.weight_decay();
    numbers.unbias = 1 / (1 - std::pow(numbers.beta1, k));
    numbers.root = 1 / std::sqrt(1 - std::pow(numbers.beta2, k));
    numbers.eps = o.eps();
    return numbers;
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    at::Tensor& mean = t.moments[0];
    at::Tensor& square = t.moments[1];
    mean.lerp_(t.gradient, 1 - k.beta1);
    square.mul_(k.beta2).addcmul_(t.gradient, t.gradient, 1 - k.beta2);
    const at::Tensor direction =
        (mean * k.unbias).div_(square.sqrt().mul_(k.root).add_(k.eps)).add_(t.parameter, k.l2);
    const at::Tensor size = t.parameter.norm();
    const at::Tensor length = direction.norm();
    const at::Tensor ratio =
        at::where((size > 0).logical_and(length > 0), size / length, at::ones_like(size));
    t.parameter.sub_(direction.mul(ratio), k.lr);
  }
};

template class SteppedByEngine<torch::optim::Optimizer, LambOptions, LambParamState>;

} // namespace detail

} // namespace hasten
