#include "local_sgd_moments.h"

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include "hasten/base/log.h"
#include "hasten/local_sgd/averager.h"

namespace hasten::detail {

// JSON of the ranks joined: numbers become their maximum where they differ.
nlohmann::json largest_values(const std::vector<nlohmann::json>& ranks,
                              const nlohmann::json& mine) {
  nlohmann::json joined = mine;
  for (auto& [key, value] : joined.items()) {
    for (const auto& theirs : ranks) {
      if (theirs.contains(key) && theirs[key].is_number() && value.is_number() &&
          theirs[key] > value) {
        value = theirs[key];
      }
    }
  }
  return joined;
}

void AveragedMoments::average(double weight) {
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    average(i, weight);
  }
}

void AveragedMoments::average(size_t index, double weight) {
  torch::optim::Optimizer& optimizer = *optimizers_[index]->optimizer;
  auto* own = dynamic_cast<Stateful*>(&optimizer);
  NamedTensors tensors; // of torch's optimizers: the live ones
  nlohmann::json values = nlohmann::json::object();
  if (own != nullptr) {
    own->save_state(tensors, values);
    for (auto& [name, tensor] : tensors) {
      tensor = tensor.clone();
    }
  } else {
    save_optimizer_state(optimizer, names_, tensors, values);
  }
  Averager::NamedTensorList moments;
  std::vector<const void*> identities;
  auto list = nlohmann::json::array();
  for (const auto& [name, tensor] : tensors) {
    if (tensor.is_floating_point()) {
      moments.emplace_back(name, tensor);
      identities.push_back(tensor.unsafeGetTensorImpl());
      list.push_back({name, tensor.sizes().vec()});
    }
  }
  Kept& kept = averagers_[index];
  const bool fresh = !kept.averager || identities != kept.tensors;
  const auto everyone =
      communicator_->all_gather_object({{"moments", std::hash<std::string>{}(list.dump())},
                                        {"fresh", fresh},
                                        {"steps", values.value("steps", nlohmann::json::object())}},
                                       "moments of the ranks");
  bool equal = true;
  bool any_fresh = false;
  std::vector<nlohmann::json> steps;
  for (const auto& rank : everyone) {
    equal = equal && rank.at("moments") == everyone[0].at("moments");
    any_fresh = any_fresh || rank.at("fresh").get<bool>();
    steps.push_back(rank.at("steps"));
  }
  if (!equal) {
    log_warning(
        "[accelerator::LocalSGD] the ranks' optimizers have moments of "
        "different parameters, so the moments are not averaged: the ranks would "
        "diverge in plain training after the scope");
    return;
  }
  if (any_fresh && !moments.empty()) {
    kept.averager = std::make_unique<Averager>(communicator_, moments,
                                               AveragerOptions{.measure_spread = false});
    kept.tensors = std::move(identities);
  }
  if (!moments.empty()) {
    kept.averager->average(weight);
  }
  nlohmann::json joined = values;
  if (values.contains("steps")) {
    joined["steps"] = largest_values(steps, values.at("steps"));
  }
  if (own != nullptr) {
    own->load_state(tensors, joined);
  } else if (joined != values) {
    for (auto& [name, tensor] : tensors) {
      tensor = tensor.clone(); // what is restored may not alias
    }
    prepare_optimizer_load(optimizer, names_, tensors, joined)();
  }
}

} // namespace hasten::detail
