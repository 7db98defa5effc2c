#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/known_keys.h"
#include "exported_model.h"
#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/models/lora.h"
#include "hasten/models/model_family.h"
#include "hasten/text/pretrained_folder.h"
#include "rotary.h"

namespace hasten {

namespace detail {

constexpr const char* kConfigWhere = "models::PreTrainedConfig";
constexpr const char* kPretrainedWhere = "models::pretrained";

struct ModelShape {
  std::string_view name;
  std::string_view model_type;
  int64_t layers;
  int64_t hidden;
  int64_t wide; // intermediate_size
};
constexpr std::array<ModelShape, 8> kModelShapes = {{
    {"bert-tiny", "bert", 2, 128, 512},
    {"bert-mini", "bert", 4, 256, 1024},
    {"bert-small", "bert", 4, 512, 2048},
    {"bert-base", "bert", 12, 768, 3072},
    {"gpt2-mini", "gpt2", 6, 384, 1536},
    {"gpt2-small", "gpt2", 12, 768, 3072},
    {"llama-mini", "llama", 6, 384, 1024},
    {"llama-small", "llama", 12, 768, 2048},
}};

const ModelShape* find_shape(std::string_view name) {
  const auto* found = std::ranges::find(kModelShapes, name, &ModelShape::name);
  return found == kModelShapes.end() ? nullptr : found;
}

// Call visit(name, value) for fields of PreTrainedConfig.
void visit_sizes(auto& config, const auto& visit) {
  visit("vocab_size", config.vocab_size);
  visit("hidden_size", config.hidden_size);
  visit("num_hidden_layers", config.num_hidden_layers);
  visit("num_attention_heads", config.num_attention_heads);
  visit("intermediate_size", config.intermediate_size);
  visit("max_position_embeddings", config.max_position_embeddings);
  visit("type_vocab_size", config.type_vocab_size);
}
void visit_fields(auto& config, const auto& visit) {
  visit_sizes(config, visit);
  visit("pad_token_id", config.pad_token_id);
  visit("hidden_act", config.hidden_act);
  visit("hidden_dropout_prob", config.hidden_dropout_prob);
  visit("attention_probs_dropout_prob", config.attention_probs_dropout_prob);
  visit("initializer_range", config.initializer_range);
  visit("layer_norm_eps", config.layer_norm_eps);
}

// Fields that a config.json may also have under their common names: hidden_size beside GPT-2's n_embd.
constexpr std::string_view kCommonNames[] = {"hidden_size", "num_hidden_layers",
                                             "num_attention_heads", "max_position_embeddings"};

// The family's key for a field; empty if it has none.
std::string key_of(const ModelFamily& family, const char* field) {
  const auto found = family.attribute_map.find(field);
  return found == family.attribute_map.end() ? field : found->second;
}

[[noreturn]] void throw_bad_config(std::string_view source, const std::string& what,
                                   const std::string& expected) {
  throw InputError(kConfigWhere, std::string(source) + ": " + what, expected);
}

// Moves `key` from `json` to `value`; null counts as absent.
template <typename T>
void take_key(nlohmann::json& json, std::string_view source, const std::string& key, T& value) {
  const auto found = json.find(key);
  if (found == json.end()) {
    return;
  }
  if (!found->is_null()) {
    const auto [fits, expected] =
        std::is_same_v<T, std::string> ? std::pair(found->is_string(), "a string")
        : std::is_same_v<T, int64_t>   ? std::pair(found->is_number_integer(), "a whole number")
                                       : std::pair(found->is_number(), "a number");
    if (!fits) {
      throw_bad_config(source, key + "=" + found->dump(), expected);
    }
    value = found->template get<T>();
  }
  json.erase(found);
}

// {"0": "negative", "1": "positive"} -> names by id.
std::vector<std::string> take_labels(nlohmann::json& json, std::string_view source) {
  int64_t count = 2;
  const bool json_has_count = !json.value("num_labels", nlohmann::json()).is_null();
  take_key(json, source, "num_labels", count);
  if (count < 1 || count > 1'000'000) {
    throw_bad_config(source, "num_labels=" + std::to_string(count), "1 to 1000000");
  }
  const nlohmann::json map = json.value("id2label", nlohmann::json());
  json.erase("id2label");
  json.erase("label2id");
  std::vector<std::string> names;
  if (map.is_null()) {
    for (int64_t i = 0; i < count; ++i) {
      names.push_back("LABEL_" + std::to_string(i));
    }
    return names;
  }
  for (size_t i = 0; map.is_object() && i < map.size(); ++i) {
    const auto found = map.find(std::to_string(i));
    if (found == map.end() || !found->is_string()) {
      break;
    }
    names.push_back(found->get<std::string>());
  }
  if (json_has_count && std::ssize(names) != count) {
    throw_bad_config(source, "num_labels=" + std::to_string(count),
                     std::to_string(names.size()) + ", the labels of id2label, or no such key");
  }
  if (!map.is_object() || map.empty() || names.size() != map.size()) {
    throw_bad_config(source, "id2label=" + map.dump().substr(0, 200),
                     "{\"0\": \"name\", \"1\": \"name\", …} without gaps");
  }
  return names;
}

// Other names that transformers has for the same functions.
constexpr std::pair<std::string_view, std::string_view> kActivationAliases[] = {
    {"gelu_pytorch_tanh", "gelu_new"},
    {"gelu_fast", "gelu_new"},
    {"gelu_python", "gelu"},
    {"swish", "silu"},
};

} // namespace detail

std::string_view task_name(ModelTask task) {
  return task == ModelTask::sequence_classification ? "SequenceClassification"
         : task == ModelTask::token_classification  ? "TokenClassification"
         : task == ModelTask::masked_lm             ? "MaskedLM"
                                                    : "CausalLM";
}

int64_t PreTrainedConfig::max_tokens() const {
  if (other_keys.find("\"dynamic\"") !=
      std::string::npos) { // rotary positions that grow with a text
    const auto options = parse_json(detail::kConfigWhere, "other_keys", other_keys);
    return detail::RotaryOptions::of(options, max_position_embeddings, 4).longest();
  }
  const bool after_padding = model_family(model_type).positions_after_padding;
  return max_position_embeddings - (after_padding ? pad_token_id + 1 : 0);
}

std::string PreTrainedConfig::activation() const {
  const auto* alias = std::ranges::find(detail::kActivationAliases, hidden_act,
                                        [](const auto& each) { return each.first; });
  return alias == std::end(detail::kActivationAliases) ? hidden_act : std::string(alias->second);
}

bool PreTrainedConfig::has_head(ModelTask task) const {
  const std::string name = "For" + std::string(task_name(task));
  const std::string own = model_family(model_type).class_name(task);
  return std::ranges::any_of(architectures,
                             [&](const auto& each) { return each.ends_with(name) || each == own; });
}

PreTrainedConfig PreTrainedConfig::from_json(const nlohmann::json& json, std::string_view source) {
  if (!json.is_object()) {
    detail::throw_bad_config(source, "not a JSON object", "a configuration");
  }
  nlohmann::json rest = json;
  std::string type;
  detail::take_key(rest, source, "model_type", type);
  const ModelFamily& family = model_family(type, source);
  if (family.program.empty()) { // a graph has what config.json says
    detail::check_known_keys(detail::kPretrainedWhere, std::string(source), "config.json", type,
                             json);
  }
  PreTrainedConfig config = family.defaults;
  const auto take = [&](const char* field, auto& value) {
    const std::string key = detail::key_of(family, field);
    if (!key.empty()) {
      detail::take_key(rest, source, key, value);
    }
    if (!key.empty() &&
        std::ranges::count(detail::kCommonNames, field)) { // it wins over the family's
      detail::take_key(rest, source, field, value);
    }
  };
  detail::visit_fields(config, take);
  if (json.value("pad_token_id", nlohmann::json()).is_number() && config.pad_token_id < 0) {
    detail::throw_bad_config(source, "pad_token_id=" + std::to_string(config.pad_token_id),
                             "an id of the vocabulary, or null");
  }
  if (const auto types = json.find("layer_types");
      types != json.end() && types->is_array() && std::ssize(*types) != config.num_hidden_layers) {
    detail::throw_bad_config(
        source, "layer_types=" + types->dump().substr(0, 200),
        "a type for each of num_hidden_layers=" + std::to_string(config.num_hidden_layers));
  }
  double classifier_dropout = -1;
  take("classifier_dropout", classifier_dropout);
  if (classifier_dropout >= 0) {
    config.classifier_dropout = classifier_dropout;
  }
  detail::take_key(rest, source, "problem_type", config.problem_type);
  detail::take_key(rest, source, "torch_dtype", config.dtype);
  detail::take_key(rest, source, "dtype", config.dtype);
  config.id2label = detail::take_labels(rest, source);
  const auto classes = rest.find("architectures");
  if (classes != rest.end()) {
    for (const auto& name : *classes) {
      config.architectures.push_back(name.is_string() ? std::string(name) : "");
    }
    rest.erase(classes);
  }
  rest.erase("transformers_version"); // the version that wrote the base model, which this is not
  config.other_keys = rest.dump();
  config.validate(source);
  return config;
}

nlohmann::json PreTrainedConfig::to_json() const {
  const ModelFamily& family = model_family(model_type);
  nlohmann::json json = parse_json(detail::kConfigWhere, "other_keys", other_keys);
  nlohmann::json ids = nlohmann::json::object();
  nlohmann::json names = nlohmann::json::object();
  for (size_t i = 0; i < id2label.size(); ++i) {
    ids[std::to_string(i)] = id2label[i];
    names[id2label[i]] = i;
  }
  json.update(
      {{"model_type", model_type}, {"id2label", ids}, {"label2id", names}, {"dtype", dtype}});
  if (!architectures.empty()) {
    json["architectures"] = architectures;
  }
  const auto put = [&](const char* field, const auto& value) {
    if (const std::string key = detail::key_of(family, field); !key.empty()) {
      json[key] = value;
    }
  };
  detail::visit_fields(*this, put);
  if (pad_token_id < 0) {
    json["pad_token_id"] = nullptr;
  }
  put("classifier_dropout",
      classifier_dropout ? nlohmann::json(*classifier_dropout) : nlohmann::json());
  if (!problem_type.empty()) {
    json["problem_type"] = problem_type;
  }
  return json;
}

void PreTrainedConfig::validate(std::string_view source) const {
  const ModelFamily& family = model_family(model_type, source);
  const auto check_size = [&](const char* key, int64_t value) {
    if (detail::key_of(family, key).empty()) {
      return;
    }
    // The limit keeps the product of two sizes far from overflow.
    if (value < 1 || value > 100'000'000) {
      detail::throw_bad_config(source, key + ("=" + std::to_string(value)), "1 to 100000000");
    }
  };
  detail::visit_sizes(*this, check_size);
  check_size("number of labels", num_labels());
  if (!detail::key_of(family, "num_attention_heads").empty() &&
      hidden_size % num_attention_heads != 0) {
    detail::throw_bad_config(source,
                             "hidden_size=" + std::to_string(hidden_size) +
                                 ", num_attention_heads=" + std::to_string(num_attention_heads),
                             "a width that the number of heads divides");
  }
  if (pad_token_id < std::min<int64_t>(family.defaults.pad_token_id, 0) ||
      pad_token_id >= vocab_size) {
    detail::throw_bad_config(source, "pad_token_id=" + std::to_string(pad_token_id),
                             "an id below vocab_size=" + std::to_string(vocab_size));
  }
  if (const std::string name = activation();
      name != "gelu" && name != "gelu_new" && name != "relu" && name != "silu") {
    detail::throw_bad_config(
        source, "hidden_act=\"" + hidden_act + "\"",
        "\"gelu\", \"gelu_new\", \"relu\" or \"silu\", or another name of these");
  }
  if (attn_implementation != "auto" && attn_implementation != "eager" &&
      attn_implementation != "sdpa") {
    detail::throw_bad_config(source, "attn_implementation=\"" + attn_implementation + "\"",
                             "\"auto\", \"eager\" or \"sdpa\"");
  }
  if (max_tokens() < 1) {
    detail::throw_bad_config(
        source,
        "max_position_embeddings=" + std::to_string(max_position_embeddings) +
            ", pad_token_id=" + std::to_string(pad_token_id),
        "more positions, because they begin after pad_token_id in this family");
  }
  const auto probability = [&](const char* key, double value) {
    if (!(value >= 0 && value < 1)) {
      detail::throw_bad_config(source, key + ("=" + std::to_string(value)), "from 0 to below 1");
    }
  };
  probability("hidden_dropout_prob", hidden_dropout_prob);
  probability("attention_probs_dropout_prob", attention_probs_dropout_prob);
  probability("classifier_dropout", classifier_dropout.value_or(0));
  if (!(initializer_range >= 0 && layer_norm_eps > 0)) {
    detail::throw_bad_config(source,
                             "initializer_range=" + std::to_string(initializer_range) +
                                 ", layer_norm_eps=" + std::to_string(layer_norm_eps),
                             "positive numbers");
  }
}

PreTrainedConfig AutoConfig::from_pretrained(const std::string& folder) {
  std::error_code ignored;
  const auto path =
      pretrained_folder(folder, "models::AutoConfig", "model", split(shapes_text(), ", ")) /
      "config.json";
  if (!std::filesystem::exists(path, ignored)) {
    if (LoraConfig::is_adapter(path.parent_path())) { // PEFT writes none
      return from_pretrained(LoraConfig::base_of(path.parent_path()));
    }
    throw InputError("models::AutoConfig", path.string() + ": the file is missing",
                     "a Hugging Face model folder, or one of the shapes " + shapes_text(),
                     hf_download_command(folder));
  }
  const nlohmann::json config = read_json_file("models::AutoConfig", path);
  if (config.is_object() && detail::is_exported_folder(path.parent_path())) {
    detail::register_exported_family(path.parent_path(), config);
  } else if (LoraConfig::is_adapter(path.parent_path()) && config.is_object() &&
             detail::find_model_family(config.value("model_type", "")) == nullptr) {
    from_pretrained(LoraConfig::base_of(path.parent_path())); // may be exported
  }
  return PreTrainedConfig::from_json(config, path.string());
}

PreTrainedConfig AutoConfig::for_model(std::string_view model_type) {
  return model_family(model_type, "AutoConfig::for_model").defaults;
}

PreTrainedConfig AutoConfig::from_shape(std::string_view shape, int64_t vocab_size) {
  const auto* known = detail::find_shape(shape);
  if (known == nullptr) {
    throw InputError("models::AutoConfig", "unknown shape=" + std::string(shape),
                     "one of " + shapes_text() + ", or a model folder");
  }
  PreTrainedConfig config = for_model(known->model_type);
  config.vocab_size = vocab_size;
  config.num_hidden_layers = known->layers;
  config.hidden_size = known->hidden;
  config.num_attention_heads = known->hidden / 64;
  config.intermediate_size = known->wide;
  config.validate(shape);
  return config;
}

std::string AutoConfig::shapes_text() {
  return joined(
      mapped(detail::kModelShapes, [](const auto& shape) { return std::string(shape.name); }));
}

bool AutoConfig::is_shape(std::string_view name) { return detail::find_shape(name) != nullptr; }

} // namespace hasten
