// A small model of each family.
#pragma once

#include <torch/torch.h>

#include <string>

#include "hasten/models/auto_model.h"
#include "hasten/models/model_family.h"

namespace hasten::testing_support {

constexpr int64_t kSmallVocab = 64;

/// Three blocks, so that a ModernBERT has both kinds; windows are shorter than the texts.
inline PreTrainedConfig small_config(const std::string& model_type, double dropout = 0) {
  PreTrainedConfig config = AutoConfig::for_model(model_type);
  config.vocab_size = kSmallVocab;
  config.hidden_size = 32;
  config.num_hidden_layers = 3;
  config.num_attention_heads = 2;
  config.intermediate_size = 48;
  config.max_position_embeddings = 40;
  config.pad_token_id = 1;
  config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout;
  config.classifier_dropout = dropout;
  config.initializer_range = 0.2;
  config.id2label = {"no", "maybe", "yes"};
  if (model_type == "modernbert") {
    config.other_keys =
        R"({"local_attention": 8, "embedding_dropout": )" + std::to_string(dropout) + "}";
  } else if (model_type == "gpt2") {
    config.other_keys = R"({"embd_pdrop": )" + std::to_string(dropout) + "}";
  } else if (model_family(model_type).tasks.front() == ModelTask::causal_lm) {
    config.other_keys = R"({"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 7})";
    if (model_type.starts_with("gemma") &&
        model_type != "gemma") { // the other families refuse these
      config.other_keys = R"({"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 7,
                              "sliding_window_pattern": 2, "query_pre_attn_scalar": 9,
                              "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5})";
    }
  }
  return config;
}

/// While it lives, operators use one thread: more wait for each other on a busy machine.
struct OneThread {
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before); }
  int before = at::get_num_threads();
};

/// [rows, tokens] with padding in every second row.
inline ModelInputs small_inputs(int64_t rows, int64_t tokens) {
  ModelInputs inputs{torch::randint(4, kSmallVocab, {rows, tokens}),
                     torch::ones({rows, tokens}, torch::kLong)};
  for (int64_t row = 1; row < rows; row += 2) {
    inputs.attention_mask[row].slice(0, tokens * 2 / 3).zero_();
    inputs.input_ids[row].slice(0, tokens * 2 / 3).fill_(1);
  }
  return inputs;
}

} // namespace hasten::testing_support
