#include "hasten/optim/lamb.h"

#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <utility>

#include "step_options.h"

namespace hasten {

namespace detail {

constexpr const char* kLambName = "optim::Lamb";

void check_options(const LambOptions& options) {
  require_not_negative(kLambName, "lr", options.lr());
  require_beta(kLambName, "beta1", std::get<0>(options.betas()));
  require_beta(kLambName, "beta2", std::get<1>(options.betas()));
  require_not_negative(kLambName, "eps", options.eps());
  require_not_negative(kLambName, "weight_decay", options.weight_decay());
}

class LambRules final : public StepRules {
 public:
  const char* where() const override { return kLambName; }
  void check(const Options& options) const override { check_options(own(options)); }
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
  bool by_elements() const override { return false; }
  void run(const StepArrays& arrays, const StepNumbers& numbers, const StepPass& pass, int64_t,
           int64_t) const override {
    lamb_step(arrays, numbers, pass);
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

 private:
  static const LambOptions& own(const Options& options) {
    return options_as<LambOptions>(options, kLambName);
  }
};

} // namespace detail

void LambOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}
void LambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}
void LambParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, master);
}
void LambParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(master);
}

Lamb::Lamb(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LambOptions defaults,
           FusedOptions fused)
    : SteppedByEngine(param_groups,
                      std::make_unique<LambOptions>(
                          detail::checked_options<LambOptions>(defaults, detail::check_options))) {
  detail::use_group_options<LambOptions>(*this, param_groups);
  engine_ = std::make_shared<detail::StepEngine>(std::make_unique<detail::LambRules>(), fused);
  engine_->check(*this);
}

Lamb::Lamb(std::vector<at::Tensor> parameters, LambOptions defaults, FusedOptions fused)
    : Lamb({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults), fused) {
}

void Lamb::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}
void Lamb::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}

} // namespace hasten
