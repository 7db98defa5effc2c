#include "hasten/optim/make_optimizer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/optim/adafactor.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/lion.h"
#include "hasten/optim/sgd.h"
#include "option_checks.h"
#include "step_engine.h"

namespace hasten {

namespace detail {

constexpr const char* kMakeOptimizer = "optim::make_optimizer";

/// "name=value,…" by name.
std::map<std::string, std::string> named_texts(const std::string& text) {
  std::map<std::string, std::string> values;
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    std::string item = text.substr(at, comma - at);
    std::erase(item, ' ');
    const size_t equals = item.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw InputError(kMakeOptimizer, "optim_args=" + text, "name=value,name=value");
    }
    values[item.substr(0, equals)] = item.substr(equals + 1);
    at = comma + 1;
  }
  return values;
}

/// Makes the optimizer of `groups` and gives each group exactly its options.
template <typename Optimizer, typename Options>
std::unique_ptr<torch::optim::Optimizer> made_of(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults,
    const FusedOptions& fused) {
  std::vector<torch::optim::OptimizerParamGroup> bare;
  std::vector<Options> wanted;
  for (const auto& group : groups) {
    bare.emplace_back(group.params());
    Options& options = wanted.emplace_back(defaults);
    if (!group.has_options()) {
      continue;
    }
    const auto* own = dynamic_cast<const torch::optim::AdamWOptions*>(&group.options());
    if (own == nullptr) {
      throw InputError(kMakeOptimizer, "a parameter group has options of another type",
                       "torch::optim::AdamWOptions, as decay_groups() makes them, or none");
    }
    options.weight_decay(own->weight_decay());
    if (own->lr() != torch::optim::AdamWOptions().lr()) {
      options.lr(own->lr());
    }
  }
  auto optimizer = std::make_unique<Optimizer>(bare, defaults, fused);
  for (size_t i = 0; i < wanted.size(); ++i) {
    static_cast<Options&>(optimizer->param_groups()[i].options()) = wanted[i];
  }
  optimizer->engine().check(*optimizer);
  return optimizer;
}

template <typename Options>
Options adam_options(NamedOptions& args, const OptimizerSettings& settings) {
  Options options(settings.learning_rate);
  options.betas({settings.adam_beta1, settings.adam_beta2});
  options.eps(settings.adam_epsilon);
  options.weight_decay(settings.weight_decay);
  args.take("beta1", std::get<0>(options.betas()));
  args.take("beta2", std::get<1>(options.betas()));
  args.take("eps", options.eps());
  args.take("amsgrad", options.amsgrad());
  return options;
}

AdafactorOptions adafactor_options(NamedOptions& args, const OptimizerSettings& settings) {
  AdafactorOptions options(settings.learning_rate);
  options.weight_decay(settings.weight_decay);
  options.scale_parameter(false);
  options.relative_step(false);
  args.take("eps1", std::get<0>(options.eps()));
  args.take("eps2", std::get<1>(options.eps()));
  args.take("clip_threshold", options.clip_threshold());
  args.take("decay_rate", options.decay_rate());
  if (double beta1 = 0; args.take("beta1", beta1) && beta1 != -1) {
    options.beta1(beta1);
  }
  args.take("scale_parameter", options.scale_parameter());
  args.take("relative_step", options.relative_step());
  args.take("warmup_init", options.warmup_init());
  return options;
}

} // namespace detail

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = {
      "adamw_torch", "adamw_torch_fused", "adamw", "adam", "sgd", "adafactor", "lion"};
  return names;
}

void check_optimizer(const std::string& name, const OptimizerSettings& settings) {
  make_optimizer(name, {torch::optim::OptimizerParamGroup({})}, settings);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const OptimizerSettings& settings) {
  const auto& names = optimizer_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    throw InputError(detail::kMakeOptimizer, "optim=" + name, "one of " + joined(names),
                     write_nearest(name, names));
  }
  detail::NamedOptions args(detail::kMakeOptimizer, "optim_args", name,
                            detail::named_texts(settings.args));
  FusedOptions fused;
  args.take("bf16_moments", fused.bf16_moments);
  args.take("master_weights", fused.master_weights);
  args.take("seed", fused.seed);
  const auto made = [&]<typename Optimizer>(const auto& options) {
    args.refuse_others();
    return detail::made_of<Optimizer>(groups, options, fused);
  };
  if (name == "adam") {
    return made.template operator()<Adam>(
        detail::adam_options<torch::optim::AdamOptions>(args, settings));
  }
  if (name == "adafactor") {
    return made.template operator()<Adafactor>(detail::adafactor_options(args, settings));
  }
  if (name == "sgd") {
    torch::optim::SGDOptions options(settings.learning_rate);
    options.weight_decay(settings.weight_decay);
    args.take("momentum", options.momentum());
    args.take("dampening", options.dampening());
    args.take("nesterov", options.nesterov());
    return made.template operator()<SGD>(options);
  }
  if (name == "lion") {
    LionOptions options(settings.learning_rate);
    options.weight_decay(settings.weight_decay);
    args.take("beta1", std::get<0>(options.betas()));
    args.take("beta2", std::get<1>(options.betas()));
    return made.template operator()<Lion>(options);
  }
  return made.template operator()<AdamW>(
      detail::adam_options<torch::optim::AdamWOptions>(args, settings));
}

int64_t optimizer_state_bytes(const std::string& name, const OptimizerSettings& settings,
                              const std::vector<std::vector<int64_t>>& shapes,
                              at::ScalarType dtype) {
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) {
    parameters.push_back(at::empty(shape, at::TensorOptions(at::kMeta).dtype(dtype)));
  }
  const auto optimizer =
      make_optimizer(name, {torch::optim::OptimizerParamGroup(parameters)}, settings);
  return dynamic_cast<FusedOptimizer&>(*optimizer).engine().make_state(*optimizer);
}

} // namespace hasten
