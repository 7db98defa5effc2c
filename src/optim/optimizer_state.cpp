#include "hasten/optim/optimizer_state.h"

#include <ATen/ATen.h>
#include <torch/optim.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "optimizer_list.h"
#include "step_engine.h"

namespace hasten {

namespace detail {

constexpr const char* kOptimizerStateWhere = "optim::optimizer_state";

// Calls visit("name", object.name()) if the object has it.
#define HASTEN_VISIT(object, name)               \
  if constexpr (requires { (object).name(); }) { \
    visit(#name, (object).name());               \
  }

// Calls visit(name, tensor) for each tensor of a parameter's state. [moment]
template <typename State, typename Visit>
void visit_moments(State& state, const Visit& visit) {
  HASTEN_VISIT(state, exp_avg)
  HASTEN_VISIT(state, exp_avg_sq)
  HASTEN_VISIT(state, exp_avg_absmax)
  HASTEN_VISIT(state, exp_avg_sq_absmax)
  HASTEN_VISIT(state, max_exp_avg_sq)
  HASTEN_VISIT(state, exp_avg_sq_row)
  HASTEN_VISIT(state, exp_avg_sq_col)
  HASTEN_VISIT(state, square_avg)
  HASTEN_VISIT(state, grad_avg)
  HASTEN_VISIT(state, momentum_buffer)
  HASTEN_VISIT(state, sum)
  HASTEN_VISIT(state, master)
}

// Calls visit(name, value) for each option of a group.
template <typename Options, typename Visit>
void visit_group_options(Options& options, const Visit& visit) {
  HASTEN_VISIT(options, lr)
  HASTEN_VISIT(options, weight_decay)
  HASTEN_VISIT(options, eps)
  if constexpr (requires { options.betas(); }) {
    visit("beta1", std::get<0>(options.betas()));
    visit("beta2", std::get<1>(options.betas()));
  }
  HASTEN_VISIT(options, amsgrad)
  HASTEN_VISIT(options, momentum)
  HASTEN_VISIT(options, dampening)
  HASTEN_VISIT(options, nesterov)
  HASTEN_VISIT(options, alpha)
  HASTEN_VISIT(options, centered)
  HASTEN_VISIT(options, lr_decay)
  HASTEN_VISIT(options, clip_threshold)
  HASTEN_VISIT(options, decay_rate)
  HASTEN_VISIT(options, scale_parameter)
  HASTEN_VISIT(options, relative_step)
  HASTEN_VISIT(options, warmup_init)
  if constexpr (requires { options.beta1(); }) {
    double beta1 = options.beta1().value_or(-1); // below 0 means unset
    visit("beta1", beta1);
    if constexpr (!std::is_const_v<Options>) {
      options.beta1(beta1 < 0 ? std::optional<double>() : std::optional<double>(beta1));
    }
  }
}

template <typename OptimizerType, typename StateType, typename OptionsType>
struct OptimizerKind {
  using Optimizer = OptimizerType;
  using State = StateType;
  using Options = OptionsType;
  std::string name;
};

/// Calls use(kind) for the known optimizers, until it returns true: derived classes first. Returns
/// whether it did.
template <typename Use>
bool any_optimizer_kind(const Use& use) {
  namespace of_torch = torch::optim;
  return any_optimizer([&]<typename Own>(const char*) {
           return use(OptimizerKind<Own, typename Own::OwnState, typename Own::OwnOptions>{});
         }) ||
         use(OptimizerKind<of_torch::AdamW, of_torch::AdamWParamState, of_torch::AdamWOptions>{
             "AdamW"}) ||
         use(OptimizerKind<of_torch::Adam, of_torch::AdamParamState, of_torch::AdamOptions>{
             "Adam"}) ||
         use(OptimizerKind<of_torch::SGD, of_torch::SGDParamState, of_torch::SGDOptions>{"SGD"}) ||
         use(OptimizerKind<of_torch::RMSprop, of_torch::RMSpropParamState,
                           of_torch::RMSpropOptions>{"RMSprop"}) ||
         use(OptimizerKind<of_torch::Adagrad, of_torch::AdagradParamState,
                           of_torch::AdagradOptions>{"Adagrad"});
}

// Calls use(kind) with the optimizer's kind.
template <typename Use>
void with_optimizer_kind(const torch::optim::Optimizer& optimizer, const Use& use) {
  const bool known = any_optimizer_kind([&]<typename Kind>(Kind kind) {
    const bool found = dynamic_cast<const typename Kind::Optimizer*>(&optimizer) != nullptr;
    if (found) {
      const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
      kind.name = fused == nullptr ? kind.name : fused->name();
      use(kind);
    }
    return found;
  });
  if (!known) {
    throw InputError(
        kOptimizerStateWhere,
        "an optimizer of unknown type, so the content of its state is not known",
        "one of hasten's, or torch's Adam, AdamW, SGD, RMSprop, Adagrad, or a subclass of these",
        "derive it from hasten::Stateful as well");
  }
}

const std::string& parameter_name(const ParameterNames& names, const at::Tensor& parameter) {
  return names.at(parameter.unsafeGetTensorImpl());
}

[[noreturn]] void refuse_optimizer_state(const std::string& what, const std::string& expected) {
  throw InputError(kOptimizerStateWhere, what, expected);
}

std::vector<int64_t> moment_shape(std::string_view moment, const at::Tensor& parameter) {
  auto shape = parameter.sizes().vec();
  if (shape.size() >= 2 && moment == "exp_avg_sq_row") {
    shape.erase(shape.end() - 1);
  } else if (shape.size() >= 2 && moment == "exp_avg_sq_col") {
    shape.erase(shape.end() - 2);
  }
  return shape;
}

template <typename State>
std::unique_ptr<State> read_moments(const at::Tensor& parameter, const std::string& name,
                                    const NamedTensors& tensors, const nlohmann::json& steps,
                                    bool any_dtype) {
  auto state = std::make_unique<State>();
  bool any = false;
  visit_moments(*state, [&](const char* moment, at::Tensor& target) {
    const auto found = tensors.find(std::string(moment) + "." + name);
    if (found == tensors.end()) {
      return;
    }
    const at::Tensor& saved = found->second;
    const auto shape = std::string_view(moment).ends_with("_absmax")
                           ? saved.sizes().vec() // the step checks it
                           : moment_shape(moment, parameter);
    const bool codes = tensors.contains(std::string(moment) + "_absmax." + name);
    if (saved.sizes() != at::IntArrayRef(shape) ||
        (any_dtype ? !saved.is_floating_point() && !codes
                   : saved.scalar_type() != parameter.scalar_type())) {
      refuse_optimizer_state(found->first + " has shape " + c10::str(saved.sizes()) + " " +
                                 c10::toString(saved.scalar_type()),
                             "the parameter's " + c10::str(at::IntArrayRef(shape)) + " " +
                                 c10::toString(parameter.scalar_type()));
    }
    const auto options = parameter.options().dtype(saved.scalar_type());
    target = (saved.sizes() == parameter.sizes() ? at::empty_like(parameter, options)
                                                 : at::empty(shape, options))
                 .detach()
                 .copy_(saved);
    any = true;
  });
  if constexpr (requires { state->step(); }) {
    if (const auto step = steps.find(name); step != steps.end()) {
      state->step(step->template get<int64_t>());
      any = true;
    }
  }
  return any ? std::move(state) : nullptr;
}

std::set<std::string> group_names(const torch::optim::OptimizerParamGroup& group,
                                  const ParameterNames& names) {
  std::set<std::string> list;
  for (const at::Tensor& parameter : group.params()) {
    list.insert(parameter_name(names, parameter));
  }
  return list;
}

void check_groups(const torch::optim::Optimizer& optimizer, const ParameterNames& names,
                  const std::string& kind, const nlohmann::json& values) {
  if (values.at("kind") != kind) {
    refuse_optimizer_state("the state belongs to optimizer=" + values.at("kind").dump(),
                           "this optimizer's kind, " + kind);
  }
  const auto& groups = optimizer.param_groups();
  if (values.at("groups").size() != groups.size()) {
    refuse_optimizer_state("the state has groups=" + std::to_string(values.at("groups").size()),
                           "the optimizer's " + std::to_string(groups.size()));
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto saved = values.at("groups").at(i).at("parameters").get<std::vector<std::string>>();
    const auto mine = group_names(groups[i], names);
    const auto [a, b] = std::mismatch(saved.begin(), saved.end(), mine.begin(), mine.end());
    if (a != saved.end() || b != mine.end()) {
      refuse_optimizer_state("parameter group " + std::to_string(i) + " of the state has " +
                                 (a == saved.end() ? "no " + *b : *a),
                             a == saved.end()  ? "the optimizer's parameters"
                             : b == mine.end() ? "no further parameters"
                                               : *b + " there");
    }
  }
}

} // namespace detail

bool visit_state_tensors(torch::optim::OptimizerParamState& state,
                         const std::function<void(at::Tensor&)>& use) {
  return detail::any_optimizer_kind([&]<typename Kind>(Kind) {
    auto* known = dynamic_cast<typename Kind::State*>(&state);
    if (known != nullptr) {
      detail::visit_moments(*known, [&](const char*, at::Tensor& tensor) {
        if (tensor.defined()) {
          use(tensor);
        }
      });
    }
    return known != nullptr;
  });
}

void dequantize_moments(torch::optim::OptimizerParamState& state) {
  detail::any_optimizer_kind([&]<typename Kind>(Kind) {
    auto* known = dynamic_cast<typename Kind::State*>(&state);
    if constexpr (requires { known->exp_avg_absmax(); }) {
      if (known != nullptr) {
        detail::convert_moment(known->exp_avg(), known->exp_avg_absmax(), true, false);
        detail::convert_moment(known->exp_avg_sq(), known->exp_avg_sq_absmax(), false, false);
      }
    }
    return known != nullptr;
  });
}

void save_optimizer_state(const torch::optim::Optimizer& optimizer, const ParameterNames& names,
                          NamedTensors& tensors, nlohmann::json& values) {
  detail::with_optimizer_kind(optimizer, [&]<typename Kind>(Kind kind) {
    values["kind"] = kind.name;
    if (const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer)) {
      values["rounding_seed"] = fused->engine().options().seed;
    }
    values["steps"] = nlohmann::json::object();
    values["groups"] = nlohmann::json::array();
    for (const auto& group : optimizer.param_groups()) {
      nlohmann::json saved = {{"parameters", detail::group_names(group, names)}};
      // The typed options() has no const version.
      const auto& options = static_cast<const typename Kind::Options&>(group.options());
      detail::visit_group_options(
          options, [&](const char* name, const auto& value) { saved[name] = value; });
      values["groups"].push_back(std::move(saved));
      for (const at::Tensor& parameter : group.params()) {
        const auto entry = optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (entry == optimizer.state().end() || !entry->second) {
          continue;
        }
        const std::string& name = detail::parameter_name(names, parameter);
        const auto* state = dynamic_cast<const typename Kind::State*>(entry->second.get());
        if (state == nullptr) {
          throw Error(detail::kOptimizerStateWhere,
                      "the state of parameter=" + name + " is not this optimizer's");
        }
        detail::visit_moments(*state, [&](const char* moment, const at::Tensor& tensor) {
          if (tensor.defined()) {
            std::string key = moment; // the chained + triggers g++ 12's bounds warning
            key += '.';
            key += name;
            tensors[key] = tensor;
          }
        });
        if constexpr (requires { state->step(); }) {
          values["steps"][name] = state->step();
        }
      }
    }
  });
}

std::function<void()> prepare_optimizer_load(torch::optim::Optimizer& optimizer,
                                             const ParameterNames& names,
                                             const NamedTensors& tensors,
                                             const nlohmann::json& values) {
  /// The new options of each group, and the new state of each parameter.
  struct Loaded {
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options{};
    std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> states{};
  };
  const auto loaded = std::make_shared<Loaded>();
  auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer);
  detail::with_optimizer_kind(optimizer, [&]<typename Kind>(Kind kind) {
    detail::check_groups(optimizer, names, kind.name, values);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
      const auto& group = optimizer.param_groups()[i];
      const nlohmann::json& saved = values.at("groups").at(i);
      if (fused == nullptr || !fused->engine().options().keep_options) {
        auto target = std::make_unique<typename Kind::Options>(
            static_cast<const typename Kind::Options&>(group.options()));
        detail::visit_group_options(
            *target, [&](const char* name, auto& value) { saved.at(name).get_to(value); });
        loaded->options.push_back(std::move(target));
      }
      for (const at::Tensor& parameter : group.params()) {
        // hasten's own optimizers accept any floating dtype.
        loaded->states.emplace_back(
            parameter.unsafeGetTensorImpl(),
            detail::read_moments<typename Kind::State>(
                parameter, detail::parameter_name(names, parameter), tensors, values.at("steps"),
                /*any_dtype=*/fused != nullptr));
      }
    }
  });
  const uint64_t seed =
      fused == nullptr ? 0 : values.value("rounding_seed", fused->engine().options().seed);
  return [&optimizer, loaded, fused, seed] {
    if (fused != nullptr) {
      fused->engine().options().seed = seed;
    }
    for (size_t i = 0; i < loaded->options.size(); ++i) {
      optimizer.param_groups()[i].set_options(std::move(loaded->options[i]));
    }
    for (auto& [key, state] : loaded->states) {
      if (state) {
        optimizer.state()[key] = std::move(state);
      } else {
        optimizer.state().erase(key);
      }
    }
  };
}

} // namespace hasten
