#include "averaged_state.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <unordered_set>

#include "comm/tensor_checks.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/core/named_tensors.h"

namespace hasten::detail {

AveragedBuffers::AveragedBuffers(std::shared_ptr<Communicator> communicator,
                                 const torch::nn::Module& module)
    : communicator_(std::move(communicator)) {
  constexpr std::string_view kMean = "running_mean";
  constexpr std::string_view kVariance = "running_var";
  std::unordered_set<const void*> seen;
  std::map<std::string, size_t> means; // by the name before "running_mean"
  Averager::NamedTensorList staged;
  const auto stem = [](const std::string& name, std::string_view end) {
    return name.substr(0, name.size() - end.size());
  };
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined() || buffer.numel() == 0 ||
        !seen.insert(buffer.unsafeGetTensorImpl()).second) {
      continue;
    }
    if (!buffer.is_floating_point()) {
      others_.push_back(buffer);
      continue;
    }
    if (item.key().ends_with(kMean)) {
      means[stem(item.key(), kMean)] = floats_.size();
    }
    floats_.push_back(
        {buffer, {}, at::zeros(buffer.sizes(), at::TensorOptions().dtype(at::kDouble)), {}});
    staged.emplace_back(item.key(), floats_.back().staged);
    if (item.key().ends_with(kVariance)) {
      const auto mean = means.find(stem(item.key(), kVariance));
      if (mean != means.end() && floats_[mean->second].buffer.sizes() == buffer.sizes()) {
        floats_.back().mean_of = floats_[mean->second].buffer;
        floats_.back().staged_mean = floats_[mean->second].staged;
      }
    }
  }
  if (!floats_.empty()) {
    averager_ =
        std::make_unique<Averager>(communicator_, staged, AveragerOptions{.measure_spread = false});
  }
}

void AveragedBuffers::reduce(double weight) {
  at::NoGradGuard no_grad;
  for (Pooled& pooled : floats_) {
    pooled.staged.copy_(pooled.buffer);
    if (pooled.mean_of.defined()) {
      pooled.staged.add_(pooled.mean_of.cpu().to(at::kDouble).square());
    }
  }
  if (averager_) {
    averager_->average(weight);
  }
  if (others_.empty()) {
    return;
  }
  packed_ = at::cat(
      mapped(others_, [](const at::Tensor& other) { return bytes_of(other.cpu().contiguous()); }));
  communicator_->broadcast(packed_, 0, "integer buffers");
}

void AveragedBuffers::apply() {
  at::NoGradGuard no_grad;
  for (Pooled& pooled : floats_) {
    if (pooled.mean_of.defined()) {
      pooled.staged.sub_(pooled.staged_mean.square()).clamp_min_(0);
    }
    pooled.buffer.copy_(pooled.staged);
  }
  int64_t offset = 0;
  for (at::Tensor& other : others_) {
    const auto size = static_cast<int64_t>(other.nbytes());
    other.copy_(
        packed_.narrow(0, offset, size).clone().view(other.scalar_type()).view(other.sizes()));
    offset += size;
  }
}

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
    clone_tensors(tensors);
  } else {
    for (const auto& item : optimizer.state()) {
      dequantize_moments(*item.second);
    }
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
    clone_tensors(tensors); // what is restored may not alias
    prepare_optimizer_load(optimizer, names_, tensors, joined)();
  }
}

} // namespace hasten::detail
