#include "hasten/optim/make_optimizer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "config/option_checks.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/config/training_arguments.h"
#include "optimizer_list.h"
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

} // namespace detail

void check_optimizer(const std::string& name, const OptimizerSettings& settings) {
  make_optimizer(name, {torch::optim::OptimizerParamGroup({})}, settings);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const OptimizerSettings& settings) {
  if (!spelled<OptimizerType>(name)) {
    throw InputError(detail::kMakeOptimizer, "optim=" + name, any_spelling<OptimizerType>(),
                     write_nearest(name, spelling_names<OptimizerType>()));
  }
  detail::NamedOptions args(detail::kMakeOptimizer, "optim_args", name,
                            detail::named_texts(settings.args));
  FusedOptions fused{.keep_options = settings.keep_options};
  args.take("bf16_moments", fused.bf16_moments);
  args.take("master_weights", fused.master_weights);
  args.take("seed", fused.seed);
  if (name == "adamw_8bit") {
    fused = AdamW8bit::in_8_bits(fused);
    args.take("min_8bit_size", fused.min_8bit_size);
  }
  std::unique_ptr<torch::optim::Optimizer> made;
  detail::any_optimizer([&]<typename Optimizer>(const std::string& own) {
    if (own == (name.starts_with("adamw") ? "adamw" : name)) {
      const auto options = Optimizer::named_options(args, settings);
      args.refuse_others();
      made = detail::made_of<Optimizer>(groups, options, fused);
    }
    return made != nullptr;
  });
  return made;
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
