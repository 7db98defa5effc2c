// A module that this library does not know, and values for the adapters of any.
#pragma once

#include <torch/torch.h>

namespace hasten::testing_support {

inline torch::nn::Sequential foreign_model() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(12, 20), torch::nn::ReLU(),
                               torch::nn::Linear(20, 20), torch::nn::ReLU(),
                               torch::nn::Linear(20, 3));
}

/// Gives values to what is 0 or the base's norm, so that the adapter changes the results.
inline void fill_adapter(torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    if (parameter.key().find("lora_B") != std::string::npos ||
        parameter.key().find("lora_embedding_A") != std::string::npos) {
      parameter.value().normal_(0, 0.3);
    } else if (parameter.key().find("lora_magnitude_vector") != std::string::npos) {
      parameter.value().mul_(torch::rand_like(parameter.value()) + 0.5);
    }
  }
}

} // namespace hasten::testing_support
