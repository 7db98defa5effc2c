// hasten's decoder families, a row each. A new one is a row here, with a case in
// tools/golden/families.py.
#include <array>

#include "decoder.h"

namespace hasten::detail {

/// A family whose model the traits describe. `family` has its names, and sizes in `defaults`.
static ModelFamily decoder_family(const DecoderTraits& traits, ModelFamily family) {
  family.tasks = {ModelTask::causal_lm, ModelTask::sequence_classification,
                  ModelTask::token_classification};
  family.attribute_map.insert({"type_vocab_size", ""});
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
  family.defaults.other_keys = R"({"embd_pdrop": 0.1, "tie_word_embeddings": true})";
  return decoder_family({.words = "transformer.wte",
                         .positions = "transformer.wpe",
                         .layers = "transformer.h",
                         .norm = "transformer.ln_f",
                         .gpt2_blocks = true},
                        std::move(family));
}

/// Sizes of a family with Llama's names, and values of keys that only some families have.
static PreTrainedConfig sizes(const std::array<int64_t, 7>& of, const char* other_keys,
                              double rms_norm_eps = 1e-6) {
  return {.vocab_size = of[0],
          .hidden_size = of[1],
          .num_hidden_layers = of[2],
          .num_attention_heads = of[3],
          .intermediate_size = of[4],
          .max_position_embeddings = of[5],
          .pad_token_id = of[6],
          .hidden_act = "silu",
          .hidden_dropout_prob = 0,
          .attention_probs_dropout_prob = 0,
          .layer_norm_eps = rms_norm_eps,
          .other_keys = other_keys};
}

static ModelFamily llama_family(const char* model_type, const char* class_prefix,
                                PreTrainedConfig defaults, const DecoderTraits& traits) {
  ModelFamily family{.model_type = model_type,
                     .class_prefix = class_prefix,
                     .base_model_prefix = "model",
                     .attribute_map = {{"hidden_dropout_prob", ""},
                                       {"attention_probs_dropout_prob", "attention_dropout"},
                                       {"layer_norm_eps", "rms_norm_eps"}},
                     .lora_target_modules = {"q_proj", "v_proj"}};
  family.defaults = std::move(defaults);
  if (traits.fused_projections) {
    family.lora_target_modules = {"qkv_proj"};
    family.attribute_map["hidden_dropout_prob"] = "resid_pdrop";
  }
  return decoder_family(traits, std::move(family));
}

static ModelFamily gemma_family(const char* model_type, const char* class_prefix,
                                PreTrainedConfig defaults, const DecoderTraits& traits) {
  defaults.hidden_act = "gelu_pytorch_tanh";
  ModelFamily family = llama_family(model_type, class_prefix, std::move(defaults), traits);
  if (traits.sandwich_norms) { // Gemma 2 and 3
    family.attribute_map["hidden_act"] = "hidden_activation";
  }
  if (traits.local_rotary) {
    family.class_names = {{ModelTask::causal_lm, "Gemma3ForCausalLM"}};
    family.tasks.pop_back(); // transformers has no class for token_classification
  }
  return family;
}

std::vector<ModelFamily> decoder_families() {
  const DecoderTraits mistral{.query_bias = false,
                              .output_bias = false,
                              .mlp_bias = false,
                              .windows = AttentionWindows::every_layer};
  DecoderTraits ministral = mistral, ministral3 = mistral, phi3 = mistral;
  ministral3.scaled_queries = true;
  ministral.windows = AttentionWindows::pattern;
  phi3.fused_projections = true;
  const DecoderTraits gemma{.mlp_bias = false, .norms_add_one = true, .scaled_embeddings = true};
  DecoderTraits gemma2 = gemma;
  gemma2.sandwich_norms = true;
  gemma2.windows = AttentionWindows::pattern;
  DecoderTraits gemma3 = gemma2;
  gemma3.head_norms = gemma3.local_rotary = true;
  const char* mistral_keys = R"({"num_key_value_heads": 8, "sliding_window": 4096})";
  // transformers' defaults: vocab_size, hidden_size, num_hidden_layers, num_attention_heads,
  // intermediate_size, max_position_embeddings, pad_token_id.
  return {gpt2_family(),
          llama_family("llama", "Llama", sizes({32000, 4096, 32, 32, 11008, 2048, -1}, "{}"), {}),
          llama_family("mistral", "Mistral",
                       sizes({32000, 4096, 32, 32, 14336, 131072, -1}, mistral_keys), mistral),
          llama_family("ministral", "Ministral",
                       sizes({32000, 4096, 32, 32, 14336, 131072, -1}, mistral_keys), ministral),
          llama_family("ministral3", "Ministral3",
                       sizes({131072, 4096, 34, 32, 14336, 262144, 11},
                             R"({"num_key_value_heads": 8, "head_dim": 128,
                             "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000,
                               "factor": 16, "original_max_position_embeddings": 16384, "mscale": 1,
                               "mscale_all_dim": 1, "llama_4_scaling_beta": 0.1}})",
                             1e-5),
                       ministral3),
          llama_family("phi3", "Phi3",
                       sizes({32064, 3072, 32, 32, 8192, 4096, 32000},
                             R"({"original_max_position_embeddings": 4096})", 1e-5),
                       phi3),
          gemma_family("gemma", "Gemma",
                       sizes({256000, 3072, 28, 16, 24576, 8192, 0},
                             R"({"head_dim": 256, "tie_word_embeddings": true})"),
                       gemma),
          gemma_family(
              "gemma2", "Gemma2",
              sizes({256000, 2304, 26, 8, 9216, 8192, 0},
                    R"({"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
                             "sliding_window": 4096, "sliding_window_pattern": 2,
                             "attn_logit_softcapping": 50, "final_logit_softcapping": 30,
                             "tie_word_embeddings": true})"),
              gemma2),
          gemma_family(
              "gemma3_text", "Gemma3Text",
              sizes({262208, 2304, 26, 8, 9216, 131072, 0},
                    R"({"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
                             "sliding_window": 4096, "sliding_window_pattern": 6,
                             "rope_theta": 1000000, "rope_local_base_freq": 10000,
                             "tie_word_embeddings": true})"),
              gemma3),
          llama_family("qwen2", "Qwen2",
                       sizes({151936, 4096, 32, 32, 22016, 32768, -1},
                             R"({"sliding_window": 4096, "max_window_layers": 28})"),
                       {.query_bias = true,
                        .output_bias = false,
                        .mlp_bias = false,
                        .windows = AttentionWindows::upper_layers}),
          llama_family(
              "qwen3", "Qwen3",
              sizes({151936, 4096, 32, 32, 22016, 32768, -1},
                    R"({"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28})"),
              {.mlp_bias = false, .head_norms = true, .windows = AttentionWindows::upper_layers}),
          llama_family(
              "smollm3", "SmolLM3",
              sizes({128256, 2048, 36, 16, 11008, 32768, 128004},
                    R"({"num_key_value_heads": 4, "rope_theta": 2000000,
                             "tie_word_embeddings": true})"),
              {.windows = AttentionWindows::layers_without_rotary, .layers_without_rotary = true})};
}

} // namespace hasten::detail
