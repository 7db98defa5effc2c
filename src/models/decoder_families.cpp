// hasten's decoder families, a row each. A new one is a row here, with a case in
// tools/golden/families.py.
#include "decoder.h"

namespace hasten::detail {

/// A family whose model the traits describe. `family` has its names, and sizes in `defaults`.
static ModelFamily decoder_family(const DecoderTraits& traits, ModelFamily family) {
  family.tasks = {ModelTask::causal_lm, ModelTask::sequence_classification};
  family.attribute_map.insert({{"type_vocab_size", ""}, {"classifier_dropout", ""}});
  family.make = [traits](const PreTrainedConfig& config, ModelTask task) {
    return make_decoder(config, task, traits);
  };
  family.current_name = [](const std::string& name) { // buffers of older files
    const bool buffer = name.ends_with("rotary_emb.inv_freq") || name.ends_with(".attn.bias") ||
                        name.ends_with(".attn.masked_bias");
    return buffer ? std::string() : name;
  };
  return family;
}

static ModelFamily gpt2_family() {
  ModelFamily family{.model_type = "gpt2",
                     .class_prefix = "GPT2",
                     .class_names = {{ModelTask::causal_lm, "GPT2LMHeadModel"}},
                     .base_model_prefix = "transformer",
                     .attribute_map = {{"hidden_size", "n_embd"},
                                       {"num_hidden_layers", "n_layer"},
                                       {"num_attention_heads", "n_head"},
                                       {"intermediate_size", ""}, // n_inner may be null
                                       {"max_position_embeddings", "n_positions"},
                                       {"hidden_act", "activation_function"},
                                       {"hidden_dropout_prob", "resid_pdrop"},
                                       {"attention_probs_dropout_prob", "attn_pdrop"},
                                       {"layer_norm_eps", "layer_norm_epsilon"}},
                     .lora_target_modules = {"c_attn"}};
  family.defaults.vocab_size = 50257;
  family.defaults.max_position_embeddings = 1024;
  family.defaults.pad_token_id = -1;
  family.defaults.hidden_act = "gelu_new";
  family.defaults.layer_norm_eps = 1e-5;
  return decoder_family({.words = "transformer.wte",
                         .positions = "transformer.wpe",
                         .layers = "transformer.h",
                         .norm = "transformer.ln_f",
                         .gpt2_blocks = true,
                         .embd_pdrop = 0.1,
                         .tie_word_embeddings = true},
                        std::move(family));
}

/// A family with Llama's names. `defaults` has its sizes.
static ModelFamily llama_family(const char* model_type, const char* class_prefix,
                                PreTrainedConfig defaults, const DecoderTraits& traits) {
  defaults.hidden_act = "silu";
  defaults.hidden_dropout_prob = defaults.attention_probs_dropout_prob = 0;
  defaults.layer_norm_eps = 1e-6;
  ModelFamily family{.model_type = model_type,
                     .class_prefix = class_prefix,
                     .base_model_prefix = "model",
                     .attribute_map = {{"hidden_dropout_prob", ""},
                                       {"attention_probs_dropout_prob", "attention_dropout"},
                                       {"layer_norm_eps", "rms_norm_eps"}},
                     .lora_target_modules = {"q_proj", "v_proj"}};
  family.defaults = std::move(defaults);
  return decoder_family(traits, std::move(family));
}

std::vector<ModelFamily> decoder_families() {
  // The sizes are transformers' defaults.
  const PreTrainedConfig llama{.vocab_size = 32000,
                               .hidden_size = 4096,
                               .num_hidden_layers = 32,
                               .num_attention_heads = 32,
                               .intermediate_size = 11008,
                               .max_position_embeddings = 2048,
                               .pad_token_id = -1};
  PreTrainedConfig qwen = llama;
  qwen.vocab_size = 151936;
  qwen.intermediate_size = 22016;
  qwen.max_position_embeddings = 32768;
  PreTrainedConfig mistral = llama;
  mistral.intermediate_size = 14336;
  mistral.max_position_embeddings = 131072;
  const PreTrainedConfig smollm3{.vocab_size = 128256,
                                 .hidden_size = 2048,
                                 .num_hidden_layers = 36,
                                 .num_attention_heads = 16,
                                 .intermediate_size = 11008,
                                 .max_position_embeddings = 32768,
                                 .pad_token_id = 128004};
  return {gpt2_family(),
          llama_family("llama", "Llama", llama, {}),
          llama_family("mistral", "Mistral", mistral,
                       {.query_bias = false,
                        .output_bias = false,
                        .mlp_bias = false,
                        .windows = AttentionWindows::every_layer,
                        .num_key_value_heads = 8}),
          llama_family("qwen2", "Qwen2", qwen,
                       {.query_bias = true,
                        .output_bias = false,
                        .mlp_bias = false,
                        .windows = AttentionWindows::upper_layers}),
          llama_family("qwen3", "Qwen3", qwen,
                       {.mlp_bias = false,
                        .head_norms = true,
                        .windows = AttentionWindows::upper_layers,
                        .head_dim = 128}),
          llama_family("smollm3", "SmolLM3", smollm3,
                       {.windows = AttentionWindows::layers_without_rotary,
                        .layers_without_rotary = true,
                        .num_key_value_heads = 4,
                        .rope_theta = 2'000'000,
                        .tie_word_embeddings = true})};
}

} // namespace hasten::detail
