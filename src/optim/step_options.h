// What the optimizers' rules have in common. Private to them.
#pragma once

#include <ATen/ATen.h>

#include "hasten/base/error.h"
#include "option_checks.h"
#include "step_engine.h"

namespace hasten::detail {

/// `options` once they are known to be good: before LibTorch looks at them, whose
/// errors do not name them.
template <typename Options>
Options checked_options(Options options, void (*check)(const Options&)) {
  check(options);
  return options;
}

template <typename Options>
const Options& options_as(const torch::optim::OptimizerOptions& options, const char* where) {
  const auto* own = dynamic_cast<const Options*>(&options);
  if (own == nullptr) {
    throw InputError(where, "a parameter group has options of another optimizer",
                     "options of this one, or none");
  }
  return *own;
}

/// The state in `slot` as State: made, or taken over from torch's own Base.
template <typename State, typename Base = State>
State& state_in(std::unique_ptr<torch::optim::OptimizerParamState>& slot) {
  if (auto* state = dynamic_cast<State*>(slot.get())) {
    return *state;
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

/// LibTorch merges the options of groups for its own optimizers only.
template <typename Options>
void use_group_options(torch::optim::Optimizer& optimizer,
                       const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].has_options()) {
      optimizer.param_groups()[i].set_options(groups[i].options().clone());
    }
  }
}

} // namespace hasten::detail
