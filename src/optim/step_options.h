// Shared by the rules of the optimizers. Private to them.
#pragma once

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "config/option_checks.h"
#include "hasten/base/error.h"
#include "hasten/optim/make_optimizer.h"
#include "step_engine.h"

namespace hasten::detail {

/// The rules of the optimizer with these options: what StepRules asks for, and take(options, args,
/// settings), which sets what --optim-args and the settings say beyond lr, weight_decay and betas.
template <typename Options>
class Rules;

/// Their base.
template <typename OwnOptions>
class RulesOf : public StepRules {
 public:
  using StepRules::StepRules;
  void check(const Options& options) const final {
    if (dynamic_cast<const OwnOptions*>(&options) == nullptr) {
      throw InputError(where(), "a parameter group has options of another optimizer",
                       "options of this one, or none");
    }
    const OwnOptions& o = own(options);
    require_not_negative(where(), "lr", o.lr());
    if constexpr (requires { o.betas(); }) {
      require_beta(where(), "beta1", std::get<0>(o.betas()));
      require_beta(where(), "beta2", std::get<1>(o.betas()));
    }
    if constexpr (requires { require_not_negative(where(), "eps", o.eps()); }) {
      require_not_negative(where(), "eps", o.eps());
    }
    require_not_negative(where(), "weight_decay", o.weight_decay());
    check_own(o);
  }

 protected:
  /// Checks what only this optimizer has.
  virtual void check_own(const OwnOptions&) const {}
  /// Each step calls it for each parameter, so there is no dynamic_cast.
  static const OwnOptions& own(const Options& options) {
    return static_cast<const OwnOptions&>(options);
  }
};

/// The state in `slot` as State: existing, converted from torch's Base, or new.
template <typename State, typename Base = State>
State& state_in(std::unique_ptr<torch::optim::OptimizerParamState>& slot) {
  if (slot != nullptr && typeid(*slot) == typeid(State)) { // each step: no dynamic_cast
    return static_cast<State&>(*slot);
  }
  auto made = std::make_unique<State>();
  if constexpr (!std::is_same_v<State, Base>) {
    if (const auto* base = dynamic_cast<const Base*>(slot.get())) {
      made = std::make_unique<State>(*base);
    }
  }
  State& state = *made;
  slot = std::move(made);
  return state;
}

/// Defaults for Base's constructor. Checked first, because LibTorch's errors do not name options.
template <typename Base, typename Options>
auto base_defaults(Options options) {
  Rules<Options>().check(options);
  if constexpr (std::is_same_v<Base, torch::optim::Optimizer>) {
    return std::make_unique<Options>(std::move(options));
  } else {
    return options;
  }
}

template <typename Base, typename Options, typename State>
SteppedByEngine<Base, Options, State>::SteppedByEngine(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults,
    FusedOptions fused)
    : Base(param_groups, base_defaults<Base>(std::move(defaults))),
      FusedOptimizer(std::make_shared<StepEngine>(std::make_unique<Rules<Options>>(), fused)) {
  if constexpr (std::is_same_v<Base, torch::optim::Optimizer>) {
    // LibTorch merges group options only for its own optimizers.
    for (size_t i = 0; i < param_groups.size(); ++i) {
      if (param_groups[i].has_options()) {
        this->param_groups()[i].set_options(param_groups[i].options().clone());
      }
    }
  }
  engine().check(*this);
}

template <typename Base, typename Options, typename State>
SteppedByEngine<Base, Options, State>::SteppedByEngine(std::vector<at::Tensor> parameters,
                                                       Options defaults, FusedOptions fused)
    : SteppedByEngine(std::vector{torch::optim::OptimizerParamGroup(std::move(parameters))},
                      std::move(defaults), fused) {}

template <typename Base, typename Options, typename State>
at::Tensor SteppedByEngine<Base, Options, State>::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  engine().update(*this, {});
  return loss;
}

template <typename Base, typename Options, typename State>
void SteppedByEngine<Base, Options, State>::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

template <typename Base, typename Options, typename State>
void SteppedByEngine<Base, Options, State>::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, *this);
}

template <typename Base, typename Options, typename State>
Options SteppedByEngine<Base, Options, State>::named_options(NamedOptions& args,
                                                             const OptimizerSettings& settings) {
  Options options(settings.learning_rate);
  options.weight_decay(settings.weight_decay);
  Rules<Options>::take(options, args, settings);
  if constexpr (requires { options.betas(); }) {
    args.take("beta1", std::get<0>(options.betas()));
    args.take("beta2", std::get<1>(options.betas()));
  }
  return options;
}

} // namespace hasten::detail
