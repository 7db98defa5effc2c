#include "hasten/optim/adamw.h"

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <memory>
#include <type_traits>

#include "step_block.h"
#include "step_options.h"

namespace hasten::detail {

template <typename T, bool kAmsgrad>
HASTEN_VECTOR_CLONES void adam_loop(T* __restrict p, const T* __restrict g, T* __restrict m,
                                    T* __restrict v, T* __restrict x, int64_t n,
                                    const NumbersAs<T> k) {
  for (int64_t i = 0; i < n; ++i) {
    const T gradient = g[i] + k.l2 * p[i];
    const T mean = m[i] + (gradient - m[i]) * k.share1;
    const T square = v[i] * k.beta2 + gradient * gradient * k.share2;
    m[i] = mean;
    v[i] = square;
    T under = square;
    if constexpr (kAmsgrad) {
      under = x[i] > square ? x[i] : square;
      x[i] = under;
    }
    p[i] = p[i] * k.keep - k.step_size * mean / (std::sqrt(under) * k.root + k.eps);
  }
}

/// Moments: mean, mean square, with amsgrad the largest mean square.
static void adam_step(const StepArrays& a, const StepNumbers& numbers, const StepPass& pass,
                      int64_t begin, int64_t end) {
  in_step_type(a, [&]<typename T>(T) {
    const NumbersAs<T> k(numbers);
    over_blocks<T>(a, pass, begin, end, [&](T* p, const T* g, T* m, T* v, T* x, int64_t n) {
      numbers.amsgrad ? adam_loop<T, true>(p, g, m, v, x, n, k)
                      : adam_loop<T, false>(p, g, m, v, x, n, k);
    });
  });
}

template <typename Options>
constexpr bool kDecoupled = std::is_same_v<Options, torch::optim::AdamWOptions>;

template <typename OwnOptions>
class AdamRules : public RulesOf<OwnOptions> {
 public:
  using typename StepRules::Options;
  using typename StepRules::State;
  AdamRules()
      : RulesOf<OwnOptions>({kDecoupled<OwnOptions> ? "optim::AdamW" : "optim::Adam", adam_step}) {}
  StateMembers parts(const at::Tensor&, std::unique_ptr<State>& slot) const override {
    using TorchState = std::conditional_t<kDecoupled<OwnOptions>, torch::optim::AdamWParamState,
                                          torch::optim::AdamParamState>;
    auto& state = state_in<WithMaster<TorchState>, TorchState>(slot);
    return {&state.step(),
            &state.master(),
            {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()},
            {&state.exp_avg_absmax(), &state.exp_avg_sq_absmax()}};
  }
  at::Tensor make_moment(int which, const at::Tensor& parameter, const Options& options,
                         at::ScalarType dtype) const override {
    return which == 2 && !this->own(options).amsgrad() ? at::Tensor()
                                                       : at::zeros_like(parameter, dtype);
  }
  StepNumbers numbers(const Options& options, int64_t step, bool) const override {
    const OwnOptions& o = this->own(options);
    const auto [beta1, beta2] = o.betas();
    const auto k = static_cast<double>(step);
    StepNumbers numbers;
    numbers.lr = o.lr();
    numbers.weight_decay = o.weight_decay();
    numbers.keep = kDecoupled<OwnOptions> ? 1 - o.lr() * o.weight_decay() : 1;
    numbers.l2 = kDecoupled<OwnOptions> ? 0 : o.weight_decay();
    numbers.beta1 = beta1;
    numbers.beta2 = beta2;
    numbers.step_size = o.lr() / (1 - std::pow(beta1, k));
    numbers.root = 1 / std::sqrt(1 - std::pow(beta2, k));
    numbers.eps = o.eps();
    numbers.amsgrad = o.amsgrad();
    return numbers;
  }
  static void take(OwnOptions& options, NamedOptions& args, const OptimizerSettings& settings) {
    options.betas({settings.adam_beta1, settings.adam_beta2});
    options.eps(settings.adam_epsilon);
    args.take("eps", options.eps());
    args.take("amsgrad", options.amsgrad());
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    const std::vector<at::Tensor> steps(
        t.parameters.size(),
        at::full({}, static_cast<double>(t.step), t.parameters[0].options().dtype(at::kFloat)));
    const auto fused = [&](auto operation) {
      operation(t.parameters, t.gradients, t.moments[0], t.moments[1],
                k.amsgrad ? at::TensorList(t.moments[2]) : at::TensorList(), steps, k.lr, k.beta1,
                k.beta2, k.weight_decay, k.eps, k.amsgrad, /*maximize=*/false,
                /*grad_scale=*/std::nullopt, t.found_inf);
    };
    if constexpr (kDecoupled<OwnOptions>) {
      fused([](auto... arguments) { at::_fused_adamw_(arguments...); });
    } else {
      fused([](auto... arguments) { at::_fused_adam_(arguments...); });
    }
  }
};

template <>
class Rules<torch::optim::AdamWOptions> final : public AdamRules<torch::optim::AdamWOptions> {};
template <>
class Rules<torch::optim::AdamOptions> final : public AdamRules<torch::optim::AdamOptions> {};
template class SteppedByEngine<torch::optim::AdamW, torch::optim::AdamWOptions, AdamWParamState>;
template class SteppedByEngine<torch::optim::Adam, torch::optim::AdamOptions, AdamParamState>;

} // namespace hasten::detail
