#include "base/registry.h"
#include "decoder.h"
#include "encoder.h"
#include "exported_model.h"
#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/models/model_family.h"

namespace hasten {

namespace detail {

constexpr EncoderNames kBertNames = {.layers = "encoder.layer",
                                     .query = "attention.self.query",
                                     .key = "attention.self.key",
                                     .value = "attention.self.value",
                                     .attention_output = "attention.output.dense",
                                     .attention_norm = "attention.output.LayerNorm",
                                     .intermediate = "intermediate.dense",
                                     .output = "output.dense",
                                     .output_norm = "output.LayerNorm",
                                     .positions_after_padding = false};

// Buffers, older names, and a second name of a bias.
std::string current_encoder_name(const std::string& name) {
  if (name.ends_with("position_ids") || name.ends_with("token_type_ids")) {
    return "";
  }
  for (const auto& [old_end, end] : {std::pair("LayerNorm.gamma", "LayerNorm.weight"),
                                     {"LayerNorm.beta", "LayerNorm.bias"},
                                     {"cls.predictions.decoder.bias", "cls.predictions.bias"},
                                     {"lm_head.decoder.bias", "lm_head.bias"}}) {
    if (name.ends_with(old_end)) {
      return name.substr(0, name.size() - std::string_view(old_end).size()) + end;
    }
  }
  return name;
}

std::shared_ptr<PreTrainedModelImpl> make_bert(const PreTrainedConfig& config, ModelTask task) {
  const std::string base = model_family(config.model_type).base_model_prefix;
  HeadSpec head;
  head.dropout = config.classifier_dropout.value_or(config.hidden_dropout_prob);
  head.output = "classifier";
  if (task == ModelTask::sequence_classification) {
    head.dense = base + ".pooler.dense";
    head.activation = "tanh";
  } else if (task == ModelTask::masked_lm) {
    head = {.dense = "cls.predictions.transform.dense",
            .norm = "cls.predictions.transform.LayerNorm",
            .output = "cls.predictions.bias",
            .tied = "cls.predictions.decoder.weight",
            .activation = config.activation()};
  }
  return make_encoder_model(config, task, base, make_bert_encoder(config, kBertNames), head);
}

ModelFamily bert_family(const char* model_type, const char* class_prefix) {
  return {.model_type = model_type,
          .class_prefix = class_prefix,
          .base_model_prefix = model_type,
          .make = make_bert,
          .lora_target_modules = {"query", "value"},
          .current_name = current_encoder_name};
}

constexpr EncoderNames kDistilBertNames = {.layers = "transformer.layer",
                                           .query = "attention.q_lin",
                                           .key = "attention.k_lin",
                                           .value = "attention.v_lin",
                                           .attention_output = "attention.out_lin",
                                           .attention_norm = "sa_layer_norm",
                                           .intermediate = "ffn.lin1",
                                           .output = "ffn.lin2",
                                           .output_norm = "output_layer_norm",
                                           .positions_after_padding = false};

std::shared_ptr<PreTrainedModelImpl> make_distilbert(const PreTrainedConfig& config,
                                                     ModelTask task) {
  // Its type is checked here; init_weight() reads it.
  family_option(parse_json("models::DistilBert", "other_keys", config.other_keys),
                "sinusoidal_pos_embds", false);
  HeadSpec head;
  head.output = "classifier";
  if (task == ModelTask::sequence_classification) {
    head.dense = "pre_classifier";
    head.activation = "relu";
    head.dropout = config.classifier_dropout.value_or(config.hidden_dropout_prob);
  } else if (task == ModelTask::token_classification) {
    head.dropout = config.hidden_dropout_prob;
  } else {
    head = {.dense = "vocab_transform",
            .norm = "vocab_layer_norm",
            .output = "vocab_projector.bias",
            .tied = "vocab_projector.weight",
            .activation = config.activation()};
  }
  return make_encoder_model(config, task, "distilbert", make_bert_encoder(config, kDistilBertNames),
                            head);
}

ModelFamily distilbert_family() {
  ModelFamily family{.model_type = "distilbert",
                     .class_prefix = "DistilBert",
                     .base_model_prefix = "distilbert",
                     .attribute_map = {{"hidden_size", "dim"},
                                       {"num_hidden_layers", "n_layers"},
                                       {"num_attention_heads", "n_heads"},
                                       {"intermediate_size", "hidden_dim"},
                                       {"hidden_act", "activation"},
                                       {"hidden_dropout_prob", "dropout"},
                                       {"attention_probs_dropout_prob", "attention_dropout"},
                                       {"classifier_dropout", "seq_classif_dropout"},
                                       {"type_vocab_size", ""},
                                       {"layer_norm_eps", ""}},
                     .make = make_distilbert,
                     .current_name = current_encoder_name};
  family.defaults.num_hidden_layers = 6;
  family.defaults.type_vocab_size = 0;
  family.defaults.classifier_dropout = 0.2;
  return family;
}

std::shared_ptr<PreTrainedModelImpl> make_roberta(const PreTrainedConfig& config, ModelTask task) {
  HeadSpec head;
  head.dropout = config.classifier_dropout.value_or(config.hidden_dropout_prob);
  head.output = "classifier";
  if (task == ModelTask::sequence_classification) {
    head.dense = "classifier.dense";
    head.output = "classifier.out_proj";
    head.activation = "tanh";
    head.dropout_before = head.dropout;
  } else if (task == ModelTask::masked_lm) {
    head = {.dense = "lm_head.dense",
            .norm = "lm_head.layer_norm",
            .output = "lm_head.bias",
            .tied = "lm_head.decoder.weight"};
  }
  EncoderNames names = kBertNames;
  names.positions_after_padding = true;
  return make_encoder_model(config, task, "roberta", make_bert_encoder(config, names), head);
}

ModelFamily roberta_family(const char* model_type, const char* class_prefix, int64_t vocab_size) {
  ModelFamily family{.model_type = model_type,
                     .class_prefix = class_prefix,
                     .base_model_prefix = "roberta",
                     .positions_after_padding = true,
                     .make = make_roberta,
                     .lora_target_modules = {"query", "value"},
                     .current_name = current_encoder_name};
  family.defaults.vocab_size = vocab_size;
  family.defaults.pad_token_id = 1;
  return family;
}

std::shared_ptr<PreTrainedModelImpl> make_modern_bert(const PreTrainedConfig& config,
                                                      ModelTask task) {
  const auto options = parse_json("models::ModernBert", "other_keys", config.other_keys);
  HeadSpec head{.dense = "head.dense",
                .norm = "head.norm",
                .activation = family_option<std::string>(options, "classifier_activation", "gelu"),
                .dense_bias = family_option(options, "classifier_bias", false),
                .norm_bias = family_option(options, "norm_bias", false)};
  if (head.activation != "gelu" && head.activation != "relu" && head.activation != "tanh") {
    throw InputError("models::ModernBert", "config.json: classifier_activation=" + head.activation,
                     "\"gelu\", \"relu\" or \"tanh\"");
  }
  if (task == ModelTask::masked_lm) {
    head.output = family_option(options, "decoder_bias", true) ? "decoder.bias" : "";
    head.tied = "decoder.weight";
  } else {
    const auto pooling = family_option<std::string>(options, "classifier_pooling", "cls");
    if (pooling != "cls" && pooling != "mean") {
      throw InputError("models::ModernBert", "config.json: classifier_pooling=" + pooling,
                       "\"cls\" or \"mean\"");
    }
    head.output = "classifier";
    head.dropout = config.classifier_dropout.value_or(config.hidden_dropout_prob);
    head.mean_pooling = pooling == "mean";
  }
  return make_encoder_model(config, task, "model", make_modern_bert_encoder(config), head);
}

ModelFamily modern_bert_family() {
  ModelFamily family{.model_type = "modernbert",
                     .class_prefix = "ModernBert",
                     .base_model_prefix = "model",
                     .attribute_map = {{"hidden_act", "hidden_activation"},
                                       {"hidden_dropout_prob", "mlp_dropout"},
                                       {"attention_probs_dropout_prob", "attention_dropout"},
                                       {"layer_norm_eps", "norm_eps"},
                                       {"type_vocab_size", ""}},
                     .make = make_modern_bert};
  PreTrainedConfig& defaults = family.defaults;
  defaults.vocab_size = 50368;
  defaults.num_hidden_layers = 22;
  defaults.intermediate_size = 1152;
  defaults.max_position_embeddings = 8192;
  defaults.pad_token_id = 50283;
  defaults.hidden_dropout_prob = defaults.attention_probs_dropout_prob = 0;
  defaults.classifier_dropout = 0;
  defaults.layer_norm_eps = 1e-5;
  return family;
}

Registry<ModelFamily>& family_registry() {
  static Registry<ModelFamily> registry([] {
    std::vector<ModelFamily> families = decoder_families();
    families.push_back(bert_family("bert", "Bert"));
    families.push_back(bert_family("ernie", "Ernie"));
    families.push_back(distilbert_family());
    families.push_back(modern_bert_family());
    families.push_back(roberta_family("roberta", "Roberta", 50265));
    families.push_back(roberta_family("xlm-roberta", "XLMRoberta", 30522));
    families.push_back(roberta_family("camembert", "Camembert", 30522));
    Registry<ModelFamily>::Values values;
    for (ModelFamily& family : families) {
      family.defaults.model_type = family.model_type;
      values.emplace(family.model_type, std::move(family));
    }
    return values;
  }());
  return registry;
}

} // namespace detail

std::string ModelFamily::class_name(ModelTask task) const {
  const auto named = class_names.find(task);
  return named != class_names.end() ? named->second
                                    : class_prefix + "For" + std::string(task_name(task));
}

void register_model_family(ModelFamily family) {
  constexpr const char* kWhere = "models::register_model_family";
  if (family.class_prefix.empty() || !family.make) {
    throw InputError(kWhere,
                     "model_type=\"" + family.model_type + "\", class_prefix=\"" +
                         family.class_prefix + "\"" + (family.make ? "" : ", no make"),
                     "a family with a class_prefix and make");
  }
  const std::string name = family.defaults.model_type = family.model_type;
  detail::family_registry().add(kWhere, name, std::move(family));
}

const ModelFamily& model_family(std::string_view model_type, std::string_view source) {
  const ModelFamily* found = detail::family_registry().find(model_type);
  if (found == nullptr) {
    throw InputError(
        "models::model_family",
        std::string(source) + ": " +
            (model_type.empty() ? "no model_type"
                                : "model_type=\"" + std::string(model_type.substr(0, 80)) + "\""),
        "one of " + joined(model_types()),
        "export it once: hasten export --model … --task … --output-dir FOLDER, and use FOLDER; or "
        "add its family (model_family.h)");
  }
  return *found;
}

const ModelFamily* detail::find_model_family(std::string_view model_type) {
  return family_registry().find(model_type);
}

std::vector<std::string> model_types() {
  std::vector<std::string> types = detail::family_registry().names();
  std::erase_if(types, [](const auto& type) { return !model_family(type).program.empty(); });
  return types;
}

} // namespace hasten
