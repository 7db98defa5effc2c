// The optimizers' and schedulers' part of a state.
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/optim/optimizer_state.h"
#include "model_set.h"
#include "optimizer_set.h"
#include "state/state_contents.h"

namespace hasten::detail {

// hasten's optimizers save themselves. The state of torch's is known.
static nlohmann::json save_moments(const torch::optim::Optimizer& optimizer,
                                   const ParameterNames& names, const std::string& prefix,
                                   NamedTensors& tensors) {
  if (const auto* own = dynamic_cast<const Stateful*>(&optimizer)) {
    return save_stateful(*own, prefix, tensors, prefix);
  }
  NamedTensors moments;
  nlohmann::json values;
  save_optimizer_state(optimizer, names, moments, values);
  put_below(tensors, prefix, moments);
  return values;
}

static void add_moments(StateToLoad& load, const std::filesystem::path& file,
                        OptimizerState& optimizer, const ParameterNames& names,
                        NamedTensors moments, const nlohmann::json& values) {
  if (auto* own = dynamic_cast<Stateful*>(optimizer.optimizer.get())) {
    load.add(file, own, std::move(moments), values);
    return;
  }
  try {
    load.apply.push_back(prepare_optimizer_load(*optimizer.optimizer, names, moments, values));
  } catch (const InputError& error) {
    refuse_state(file, "optimizer " + std::to_string(optimizer.index) + ": " + error.what());
  }
}

void OptimizerSet::collect(StateToSave& parts) const {
  const ParameterNames names = models_.parameter_names();
  auto& values = parts.shared_values;
  values["optimizers"] = nlohmann::json::array();
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    const std::string prefix = "optimizer." + std::to_string(i) + ".";
    values["optimizers"].push_back(
        {{"stepped", optimizers_[i]->stepped},
         {"values", save_moments(*optimizers_[i]->optimizer, names, prefix, parts.shared)}});
  }
  values["schedulers"] = nlohmann::json::array();
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    const std::string prefix = "scheduler." + std::to_string(i) + ".";
    if (!schedulers_[i]->stateful) {
      throw InputError(kSaveWhere,
                       "scheduler " + std::to_string(i) + " has a type whose state is unknown",
                       "LRScheduler, one of torch's LRSchedulers, or a hasten::Stateful",
                       "derive it from hasten::Stateful");
    }
    values["schedulers"].push_back(
        {{"stepped", schedulers_[i]->stepped},
         {"values", save_stateful(*schedulers_[i]->stateful, prefix, parts.shared, prefix)}});
  }
}

void OptimizerSet::add_to(StateToLoad& load) {
  const ParameterNames names = models_.parameter_names();
  const auto& optimizers = load.shared.at("optimizers");
  const auto& schedulers = load.shared.at("schedulers");
  check_count(load, "optimizers", optimizers.size(), optimizers_.size());
  check_count(load, "schedulers", schedulers.size(), schedulers_.size());
  const auto tensors_file = load.folder / kStateTensorsFile;
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    add_moments(load, tensors_file, *optimizers_[i], names,
                tensors_below(load.shared_tensors, "optimizer." + std::to_string(i) + "."),
                optimizers[i].at("values"));
    const auto stepped = optimizers[i].at("stepped").get<uint64_t>();
    load.apply.push_back([state = optimizers_[i], stepped] { state->stepped = stepped; });
  }
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    if (!schedulers_[i]->stateful) {
      refuse_state(load.state_file(),
                   "scheduler " + std::to_string(i) + " here has a type whose state is unknown",
                   "LRScheduler, one of torch's LRSchedulers, or a hasten::Stateful");
    }
    load.add(load.state_file(), schedulers_[i]->stateful.get(),
             tensors_below(load.shared_tensors, "scheduler." + std::to_string(i) + "."),
             schedulers[i].at("values"));
    const auto stepped = schedulers[i].at("stepped").get<uint64_t>();
    load.apply.push_back([state = schedulers_[i], stepped] { state->stepped = stepped; });
  }
}

void OptimizerSet::collect_local(size_t model, StateToSave& parts) const {
  const ParameterNames names = models_.parameter_names();
  auto& saved = parts.own_values["local"]["optimizers"] = nlohmann::json::object();
  for (const auto& state : of_model(model)) {
    const std::string index = std::to_string(state->index);
    saved[index] =
        save_moments(*state->optimizer, names, "local.optimizer." + index + ".", parts.own);
  }
}

void OptimizerSet::add_local_to(size_t model, StateToLoad& load) {
  for (const auto& state : of_model(model)) {
    const std::string index = std::to_string(state->index);
    add_moments(load, load.rank_file, *state, models_.parameter_names(),
                tensors_below(load.own_tensors, "local.optimizer." + index + "."),
                load.own.at("local").at("optimizers").at(index));
  }
}

} // namespace hasten::detail
