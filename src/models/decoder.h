// hasten's decoder families.
#pragma once

#include <memory>

#include "hasten/models/pretrained_model.h"

namespace hasten::detail {

enum class DecoderFamily { gpt2, llama, qwen2, qwen3 };

/// A decoder with a head for causal_lm or sequence_classification.
std::shared_ptr<PreTrainedModelImpl> make_decoder(const PreTrainedConfig& config, ModelTask task,
                                                  DecoderFamily family);

} // namespace hasten::detail
