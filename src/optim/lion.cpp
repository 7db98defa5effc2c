#include "hasten/optim/lion.h"

#include <ATen/ATen.h>

#include <memory>

#include "step_options.h"

namespace hasten::detail {

template <>
class Rules<LionOptions> final : public RulesOf<LionOptions> {
 public:
  Rules() : RulesOf({"optim::Lion", lion_step}) {}
  StateParts parts(const at::Tensor&, std::unique_ptr<State>& slot) const override {
    auto& state = state_in<LionParamState>(slot);
    return {&state.step(), &state.master(), {&state.exp_avg()}};
  }
  StepNumbers numbers(const Options& options, int64_t, bool) const override {
    const LionOptions& o = own(options);
    StepNumbers numbers;
    numbers.lr = o.lr();
    numbers.weight_decay = o.weight_decay();
    numbers.keep = 1 - o.lr() * o.weight_decay();
    std::tie(numbers.beta1, numbers.beta2) = o.betas();
    return numbers;
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    const auto& means = t.moments[0];
    const auto mixed = at::_foreach_lerp(means, t.gradients, 1 - k.beta1);
    auto signs = at::_foreach_sign(mixed);
    at::_foreach_maximum_(signs, at::_foreach_minimum(mixed, signs)); // NaN stays NaN
    at::_foreach_add_(signs, t.parameters, k.weight_decay);
    t.descend(signs, k.lr);
    at::_foreach_lerp_(means, t.gradients, 1 - k.beta2);
  }
};

template class SteppedByEngine<torch::optim::Optimizer, LionOptions, LionParamState>;

} // namespace hasten::detail
