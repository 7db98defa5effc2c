#include <mutex>

#include "encoder.h"
#include "hasten/base/error.h"
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

// Older names, buffers, and copies of the word embeddings in the head for language models.
std::string current_encoder_name(const std::string& name) {
  for (const char* copy : {"position_ids", "token_type_ids", "cls.predictions.decoder.weight",
                           "cls.predictions.decoder.bias"}) {
    if (name.ends_with(copy)) {
      return "";
    }
  }
  for (const auto& [old_end, end] :
       {std::pair("LayerNorm.gamma", "LayerNorm.weight"), {"LayerNorm.beta", "LayerNorm.bias"}}) {
    if (name.ends_with(old_end)) {
      return name.substr(0, name.size() - std::string_view(old_end).size()) + end;
    }
  }
  return name;
}

std::shared_ptr<PreTrainedModelImpl> make_bert(const PreTrainedConfig& config, ModelTask task) {
  HeadPlan head;
  head.dropout = config.classifier_dropout.value_or(config.hidden_dropout_prob);
  head.output = "classifier";
  if (task == ModelTask::sequence_classification) {
    head.dense = "bert.pooler.dense";
    head.activation = "tanh";
  } else if (task == ModelTask::masked_lm) {
    head = {.dense = "cls.predictions.transform.dense",
            .norm = "cls.predictions.transform.LayerNorm",
            .output = "cls.predictions.bias",
            .activation = config.hidden_act};
  }
  return make_encoder_model(config, task, "bert", make_bert_encoder(config, kBertNames), head);
}

class FamilyRegistry {
 public:
  FamilyRegistry() {
    add({.model_type = "bert",
         .class_prefix = "Bert",
         .base_model_prefix = "bert",
         .make = make_bert,
         .current_name = current_encoder_name});
  }

  void add(ModelFamily family) {
    const std::lock_guard lock(mutex_);
    family.defaults.model_type = family.model_type;
    families_.try_emplace(family.model_type, std::move(family));
  }
  const ModelFamily* find(std::string_view type) const {
    const std::lock_guard lock(mutex_);
    const auto found = families_.find(type);
    return found == families_.end() ? nullptr : &found->second;
  }
  std::vector<std::string> types() const {
    const std::lock_guard lock(mutex_);
    return mapped(families_, [](const auto& entry) { return entry.first; });
  }

 private:
  mutable std::mutex mutex_{};
  std::map<std::string, ModelFamily, std::less<>> families_{}; // entries never move
};

FamilyRegistry& family_registry() {
  static FamilyRegistry registry;
  return registry;
}

} // namespace detail

void register_model_family(ModelFamily family) {
  if (family.model_type.empty() || family.class_prefix.empty() || !family.make ||
      detail::family_registry().find(family.model_type) != nullptr) {
    throw InputError("models::register_model_family",
                     "model_type=\"" + family.model_type + "\", class_prefix=\"" +
                         family.class_prefix + "\"" + (family.make ? "" : ", no make"),
                     "a family with these three, of a type other than " + joined(model_types()));
  }
  detail::family_registry().add(std::move(family));
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
        "take a model of one of them, or add its family (model_family.h)");
  }
  return *found;
}

std::vector<std::string> model_types() { return detail::family_registry().types(); }

} // namespace hasten
