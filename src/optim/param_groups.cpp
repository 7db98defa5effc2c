#include "hasten/optim/param_groups.h"

#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <unordered_set>
#include <utility>

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
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view element(name.data() + begin, end - begin);
    if (element == "norm" || element.ends_with("_norm")) {
      return true;
    }
    begin = end + 1;
  }
  return false;
}

struct DecaySplit {
  std::vector<at::Tensor> decayed{};
  std::vector<std::string> decayed_names{};
  std::vector<at::Tensor> rest{};
};

/// Depth first in registration order, own parameters before children, as in named_parameters(). A
/// LayerNorm at the root is not a child, so its parameters are classified by name, as in the
/// original.
void split_by_decay(const torch::nn::Module& module, const std::string& prefix,
                    bool inside_layer_norm, std::unordered_set<const void*>& seen,
                    DecaySplit& split) {
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    const at::Tensor& parameter = entry.value();
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) {
      continue;
    }
    const std::string name = prefix + entry.key();
    if (inside_layer_norm || name_forbids_decay(name)) {
      split.rest.push_back(parameter);
    } else {
      split.decayed.push_back(parameter);
      split.decayed_names.push_back(name);
    }
  }
  for (const auto& child : module.named_children()) {
    const bool is_layer_norm =
        dynamic_cast<const torch::nn::LayerNormImpl*>(child.value().get()) != nullptr;
    split_by_decay(*child.value(), prefix + child.key() + ".", inside_layer_norm || is_layer_norm,
                   seen, split);
  }
}

DecaySplit split_by_decay(const torch::nn::Module& model) {
  DecaySplit split;
  std::unordered_set<const void*> seen;
  split_by_decay(model, "", false, seen, split);
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
