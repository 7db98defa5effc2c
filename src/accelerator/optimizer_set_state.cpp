// The optimizers' and schedulers' part of a state.
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/optim/optimizer_state.h"
#include "optimizer_set.h"
#include "state_load.h"

namespace hasten::detail {

// hasten's optimizers save themselves. The state of torch's is known.
static void save_moments(const torch::optim::Optimizer& optimizer, const ParameterNames& names,
                         NamedTensors& moments, nlohmann::json& values) {
  if (const auto* own = dynamic_cast<const Stateful*>(&optimizer)) {
    own->save_state(moments, values);
  } else {
    save_optimizer_state(optimizer, names, moments, values);
  }
}

void OptimizerSet::collect(StateParts& parts) const {
  const ParameterNames names = models_.parameter_names();
  auto& values = parts.shared_values;
  values["optimizers"] = nlohmann::json::array();
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    const std::string prefix = "optimizer." + std::to_string(i) + ".";
    const auto& optimizer = *optimizers_[i]->optimizer;
    nlohmann::json saved = {{"stepped", optimizers_[i]->stepped}};
    if (const auto* own = dynamic_cast<const Stateful*>(&optimizer)) {
      saved["values"] = save_stateful(*own, prefix, parts.shared, prefix);
    } else {
      NamedTensors moments;
      save_optimizer_state(optimizer, names, moments, saved["values"]);
      put_below(parts.shared, prefix, moments);
    }
    values["optimizers"].push_back(std::move(saved));
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

void OptimizerSet::plan(StateLoad& load) {
  const ParameterNames names = models_.parameter_names();
  const auto& optimizers = load.shared.at("optimizers");
  const auto& schedulers = load.shared.at("schedulers");
  check_count(load, "optimizers", optimizers.size(), optimizers_.size());
  check_count(load, "schedulers", schedulers.size(), schedulers_.size());
  const auto tensors_file = load.folder / kStateTensorsFile;
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    torch::optim::Optimizer& optimizer = *optimizers_[i]->optimizer;
    const auto& values = optimizers[i].at("values");
    NamedTensors tensors =
        tensors_below(load.shared_tensors, "optimizer." + std::to_string(i) + ".");
    if (auto* own = dynamic_cast<Stateful*>(&optimizer)) {
      load.add(tensors_file, own, std::move(tensors), values);
    } else {
      try {
        load.apply.push_back(prepare_optimizer_load(optimizer, names, tensors, values));
      } catch (const InputError& error) {
        refuse_state(tensors_file, "optimizer " + std::to_string(i) + ": " + error.what());
      }
    }
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

void OptimizerSet::collect_local(size_t model, StateParts& parts) const {
  const ParameterNames names = models_.parameter_names();
  auto& saved = parts.own_values["local"]["optimizers"] = nlohmann::json::object();
  for (const auto& state : of_model(model)) {
    const std::string index = std::to_string(state->index);
    NamedTensors moments;
    save_moments(*state->optimizer, names, moments, saved[index]);
    put_below(parts.own, "local.optimizer." + index + ".", moments);
  }
}

void OptimizerSet::plan_local(size_t model, StateLoad& load) {
  for (const auto& state : of_model(model)) {
    const std::string index = std::to_string(state->index);
    const auto& own = load.own.at("local").at("optimizers").at(index);
    NamedTensors moments = tensors_below(load.own_tensors, "local.optimizer." + index + ".");
    if (auto* stateful = dynamic_cast<Stateful*>(state->optimizer.get())) {
      load.add(load.rank_file, stateful, std::move(moments), own);
    } else {
      load.apply.push_back(
          prepare_optimizer_load(*state->optimizer, models_.parameter_names(), moments, own));
    }
  }
}

void OptimizerSet::collect_trained(NamedTensors& tensors, nlohmann::json& values) const {
  const ParameterNames names = models_.parameter_names();
  auto& optimizers = values["optimizers"] = nlohmann::json::array();
  for (const auto& state : optimizers_) {
    nlohmann::json saved;
    NamedTensors moments;
    if (is_shared(*state)) {
      saved = {{"stepped", state->stepped}, {"skipped", state->skipped}};
      save_moments(*state->optimizer, names, moments, saved["values"]);
    }
    put_below(tensors, "optimizer." + std::to_string(state->index) + ".", moments);
    optimizers.push_back(std::move(saved));
  }
  auto& ticks = values["ticks"] = nlohmann::json::array();
  for (const auto& scheduler : schedulers_) {
    ticks.push_back({scheduler->ticks, scheduler->stepped});
  }
}

void OptimizerSet::take_trained(const NamedTensors& tensors, const nlohmann::json& values) {
  for (const auto& scheduler : schedulers_) {
    if (!std::ranges::all_of(watched(*scheduler),
                             [this](const auto& state) { return is_shared(*state); })) {
      continue;
    }
    const auto& theirs = values.at("ticks").at(static_cast<size_t>(scheduler->index));
    for (; scheduler->ticks < theirs[0].get<int64_t>(); ++scheduler->ticks) {
      scheduler->step();
    }
    theirs[1].get_to(scheduler->stepped);
  }
  for (const auto& state : optimizers_) { // after the schedulers' steps, which set the rates
    const auto& saved = values.at("optimizers").at(static_cast<size_t>(state->index));
    if (saved.is_null()) {
      continue;
    }
    const NamedTensors moments =
        tensors_below(tensors, "optimizer." + std::to_string(state->index) + ".");
    if (auto* own = dynamic_cast<Stateful*>(state->optimizer.get())) {
      own->load_state(moments, saved.at("values"));
    } else {
      prepare_optimizer_load(*state->optimizer, models_.parameter_names(), moments,
                             saved.at("values"))();
    }
    saved.at("stepped").get_to(state->stepped);
    saved.at("skipped").get_to(state->skipped);
  }
  done_.clear();
}

} // namespace hasten::detail
