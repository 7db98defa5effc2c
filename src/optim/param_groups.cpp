#include "hasten/optim/param_groups.h"

#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <unordered_set>
#include <utility>

#include "hasten/base/text.h"

namespace hasten {

namespace detail {

bool name_forbids_decay(const std::string& dotted_name) {
  std::string name = dotted_name;
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* part : {"bias", "layernorm", "rmsnorm"}) {
    if (name.find(part) != std::string::npos) {
      return true;
    }
  }
  const auto elements = split(name, ".");
  return std::ranges::any_of(elements, [](const std::string& element) {
    return element == "norm" || element.ends_with("_norm");
  });
}

struct DecaySplit {
  std::vector<at::Tensor> decayed{};
  std::vector<std::string> decayed_names{};
  std::vector<at::Tensor> rest{};
};

/// A LayerNorm at the root has no name, so its parameters are classified by name, as in the
/// original.
DecaySplit split_by_decay(const torch::nn::Module& model) {
  std::vector<std::string> layer_norms;
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    if (module.value()->as<torch::nn::LayerNorm>() != nullptr) {
      layer_norms.push_back(module.key() + ".");
    }
  }
  DecaySplit split;
  std::unordered_set<const void*> seen;
  for (const auto& entry : model.named_parameters()) {
    const std::string& name = entry.key();
    const at::Tensor& parameter = entry.value();
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) {
      continue;
    }
    const bool in_layer_norm = std::ranges::any_of(
        layer_norms, [&](const std::string& prefix) { return name.starts_with(prefix); });
    if (in_layer_norm || name_forbids_decay(name)) {
      split.rest.push_back(parameter);
    } else {
      split.decayed.push_back(parameter);
      split.decayed_names.push_back(name);
    }
  }
  return split;
}

} // namespace detail

std::vector<torch::optim::OptimizerParamGroup> decay_groups(const torch::nn::Module& model,
                                                            double weight_decay) {
  detail::DecaySplit split = detail::split_by_decay(model);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(split.decayed),
                      std::make_unique<torch::optim::AdamWOptions>(
                          torch::optim::AdamWOptions().weight_decay(weight_decay)));
  groups.emplace_back(std::move(split.rest), std::make_unique<torch::optim::AdamWOptions>(
                                                 torch::optim::AdamWOptions().weight_decay(0.0)));
  return groups;
}

std::vector<std::string> decayed_parameter_names(const torch::nn::Module& model) {
  return detail::split_by_decay(model).decayed_names;
}

} // namespace hasten
