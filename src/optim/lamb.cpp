#include "hasten/optim/lamb.h"

#include <ATen/ATen.h>

#include <cmath>
#include <memory>

#include "step_options.h"

namespace hasten::detail {

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
    const auto& [means, squares, none] = t.moments;
    at::_foreach_lerp_(means, t.gradients, 1 - k.beta1);
    at::_foreach_mul_(squares, k.beta2);
    at::_foreach_addcmul_(squares, t.gradients, t.gradients, 1 - k.beta2);
    auto roots = at::_foreach_sqrt(squares);
    at::_foreach_mul_(roots, k.root);
    at::_foreach_add_(roots, k.eps);
    auto directions = at::_foreach_mul(means, k.unbias);
    at::_foreach_div_(directions, roots);
    at::_foreach_add_(directions, t.parameters, k.l2);
    const at::Tensor sizes = at::stack(at::_foreach_norm(t.parameters)); // [parameter]
    const at::Tensor lengths = at::stack(at::_foreach_norm(directions));
    const at::Tensor ratios = at::where((sizes > 0).logical_and(lengths > 0), sizes / lengths, 1.0);
    at::_foreach_mul_(directions, ratios.unbind());
    t.descend(directions, k.lr);
  }
};

template class SteppedByEngine<torch::optim::Optimizer, LambOptions, LambParamState>;

} // namespace hasten::detail
