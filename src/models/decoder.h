// hasten's decoder families.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include "hasten/core/linear.h"
#include "hasten/models/pretrained_model.h"

namespace hasten::detail {

enum class DecoderFamily { gpt2, llama, qwen2, qwen3 };

/// GPT-2's linear layer: its weight is [in, out].
class Conv1DImpl : public torch::nn::Module {
 public:
  Conv1DImpl(int64_t in, int64_t out)
      : weight_(register_parameter("weight", at::empty({in, out}))),
        bias_(register_parameter("bias", at::empty({out}))) {}
  at::Tensor forward(const at::Tensor& x, const Activation& activation = {});
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return bias_; }

 private:
  at::Tensor weight_, bias_;
};
TORCH_MODULE(Conv1D);

/// A decoder with a head for causal_lm or sequence_classification.
std::shared_ptr<PreTrainedModelImpl> make_decoder(const PreTrainedConfig& config, ModelTask task,
                                                  DecoderFamily family);

} // namespace hasten::detail
