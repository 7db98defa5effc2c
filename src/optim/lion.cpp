#include "hasten/optim/lion.h"

#include <ATen/ATen.h>

#include <memory>

#include "step_block.h"
#include "step_options.h"

namespace hasten::detail {

template <typename T>
HASTEN_VECTOR_CLONES void lion_loop(T* __restrict p, const T* __restrict g, T* __restrict m,
                                    int64_t n, const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T mixed = m[i] + (g[i] - m[i]) * k.share1;
    // NaN has no sign; it must not count as 0.
    const T sign = mixed > 0 ? T(1) : mixed < 0 ? T(-1) : mixed;
    p[i] = p[i] * k.keep - k.lr * sign;
    m[i] += (g[i] - m[i]) * k.share2;
  }
}

/// Moment: mean.
static void lion_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass,
                      int64_t begin, int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end,
                   [&](T* p, const T* g, T* m, T*, T*, int64_t n) { lion_loop(p, g, m, n, k); });
  });
}

template <>
class Rules<LionOptions> final : public RulesOf<LionOptions> {
 public:
  Rules() : RulesOf({"optim::Lion", lion_step}) {}
  StateMembers parts(const at::Tensor&, std::unique_ptr<State>& slot) const override {
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
  static void take(LionOptions&, NamedOptions&, const OptimizerSettings&) {}
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
