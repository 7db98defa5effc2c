#include "hasten/optim/lion.h"

#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "step_options.h"

namespace hasten {

namespace detail {

constexpr const char* kLionName = "optim::Lion";

void check_options(const LionOptions& options) {
  require_not_negative(kLionName, "lr", options.lr());
  require_beta(kLionName, "beta1", std::get<0>(options.betas()));
  require_beta(kLionName, "beta2", std::get<1>(options.betas()));
  require_not_negative(kLionName, "weight_decay", options.weight_decay());
}

class LionRules final : public StepRules {
 public:
  const char* where() const override { return kLionName; }
  void check(const Options& options) const override { check_options(own(options)); }
  StateParts parts(const at::Tensor&, std::unique_ptr<State>& slot) const override {
    auto& state = state_in<LionParamState>(slot);
    return {&state.step(), &state.master(), {&state.exp_avg()}};
  }
  StepNumbers numbers(const Options& options, int64_t, bool) const override {
    const LionOptions& o = own(options);
    StepNumbers numbers;
    numbers.lr = o.lr();
    numbers.keep = 1 - o.lr() * o.weight_decay();
    std::tie(numbers.beta1, numbers.beta2) = o.betas();
    return numbers;
  }
  void run(const StepArrays& arrays, const StepNumbers& numbers, const StepPass& pass,
           int64_t begin, int64_t end) const override {
    lion_step(arrays, numbers, pass, begin, end);
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    at::Tensor& mean = t.moments[0];
    const at::Tensor mixed = at::lerp(mean, t.gradient, 1 - k.beta1);
    const at::Tensor sign = at::where(mixed == mixed, mixed.sign(), mixed);
    t.parameter.mul_(k.keep).sub_(sign, k.lr);
    mean.lerp_(t.gradient, 1 - k.beta2);
  }

 private:
  static const LionOptions& own(const Options& options) {
    return options_as<LionOptions>(options, kLionName);
  }
};

} // namespace detail

void LionOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}
void LionOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}
void LionParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, master);
}
void LionParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(master);
}

Lion::Lion(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LionOptions defaults,
           FusedOptions fused)
    : SteppedByEngine(param_groups,
                      std::make_unique<LionOptions>(
                          detail::checked_options<LionOptions>(defaults, detail::check_options))) {
  detail::use_group_options<LionOptions>(*this, param_groups);
  engine_ = std::make_shared<detail::StepEngine>(std::make_unique<detail::LionRules>(), fused);
  engine_->check(*this);
}

Lion::Lion(std::vector<at::Tensor> parameters, LionOptions defaults, FusedOptions fused)
    : Lion({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults), fused) {
}

void Lion::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}
void Lion::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}

} // namespace hasten
