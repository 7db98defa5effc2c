#include "hasten/models/lora.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <unordered_set>

#include "base/known_keys.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/model_family.h"
#include "hasten/text/pretrained_folder.h"
#include "lora_layer.h"

namespace hasten {

namespace detail {

constexpr const char* kLoraWhere = "models::get_peft_model";
constexpr const char* kAdapterWhere = "models::load_adapter";
constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kAdapterWeights = "adapter_model.safetensors";
constexpr const char* kAdapterPrefix = "base_model.model.";
constexpr const char* kAllLinear = "all-linear";

// PEFT's rule for a list of names.
static bool matches_module(const std::string& module, const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [&](const std::string& name) {
    return module == name || module.ends_with("." + name);
  });
}

bool inside_modules(const std::string& path, const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [&](const std::string& name) {
    return ("." + path + ".").find("." + name + ".") != std::string::npos;
  });
}

// The last parts of the layers' names, once each: what a user would name.
static std::string layer_names(const std::vector<LinearPlace>& places) {
  std::set<std::string> names;
  for (const LinearPlace& place : places) {
    const std::string last = place.name.substr(place.name.rfind('.') + 1);
    names.insert(last.find_first_not_of("0123456789") == std::string::npos ? place.name : last);
  }
  return joined(first_items({names.begin(), names.end()}, 20));
}

static bool is_adapted(const LinearPlace& place) {
  return place.module->named_children().contains("lora_A");
}

static std::vector<LinearPlace> adapted_places(const torch::nn::Module& model) {
  auto places = linear_places(model);
  std::erase_if(places, [](const LinearPlace& place) { return !is_adapted(place); });
  return places;
}

static std::vector<LinearPlace> require_adapter(const torch::nn::Module& model, const char* where) {
  auto places = adapted_places(model);
  if (places.empty()) {
    throw InputError(where, "the model has no adapter", "an adapted model",
                     "call get_peft_model or load_adapter first");
  }
  return places;
}

// PEFT adapts or copies the output layer or the word embeddings alone, also where they share a weight.
static void untie_adapted(torch::nn::Module& model, const LoraConfig& config) {
  auto* ours = dynamic_cast<PreTrainedModelImpl*>(&model);
  const TiedWeight tied = ours != nullptr ? ours->tied_weight() : TiedWeight();
  if (!tied.output.empty() && (inside_modules(tied.output, config.modules_to_save) ||
                               inside_modules(tied.output, config.target_modules) ||
                               inside_modules(tied.embeddings, config.modules_to_save))) {
    ours->untie_weights();
  }
}

// Sets what depends on the model.
static void complete_config(const torch::nn::Module& model, const std::vector<LinearPlace>& places,
                            LoraConfig& config) {
  std::string head;
  if (const auto* ours = dynamic_cast<const PreTrainedModelImpl*>(&model)) {
    head = ours->output_layer();
    if (ours->task() == ModelTask::causal_lm) {
      config.task_type = "CAUSAL_LM";
    } else if (ours->task() != ModelTask::masked_lm) {
      config.task_type =
          ours->task() == ModelTask::sequence_classification ? "SEQ_CLS" : "TOKEN_CLS";
      for (const char* name : {"classifier", "score"}) { // PEFT names both
        std::erase(config.modules_to_save, name);
        if (model.named_children().contains(name)) {
          config.modules_to_save.emplace_back(name);
        }
      }
    }
    const auto saved = config.modules_to_save;
    std::erase_if(config.modules_to_save, [&](const std::string& name) { // one inside another
      return std::ranges::any_of(
          saved, [&](const std::string& other) { return name.starts_with(other + "."); });
    });
    if (config.target_modules.empty()) {
      config.target_modules = model_family(ours->config().model_type).lora_target_modules;
    }
  }
  if (config.target_modules.empty()) {
    throw InputError(kLoraWhere, "target_modules is empty",
                     "names of linear layers: " + layer_names(places), "or \"all-linear\"");
  }
  if (config.target_modules == std::vector<std::string>{kAllLinear}) {
    config.target_modules.clear();
    for (const LinearPlace& place : places) {
      if (place.name != head && !inside_modules(place.name, config.modules_to_save)) {
        config.target_modules.push_back(place.name);
      }
    }
  }
}

static void require_names(const torch::nn::Module& model, const std::vector<LinearPlace>& places,
                          const LoraConfig& config) {
  const auto modules = model.named_modules("", false).keys();
  const auto exists = [&](const std::string& name) {
    return std::ranges::any_of(modules,
                               [&](const auto& module) { return matches_module(module, {name}); });
  };
  for (const std::string& name : config.modules_to_save) {
    if (!exists(name)) {
      throw InputError(kLoraWhere,
                       "modules_to_save: \"" + shortened(name, 200) + "\" matches nothing",
                       "modules of the model, such as " + joined(model.named_children().keys()));
    }
  }
  for (const std::string& name : config.target_modules) {
    if (std::ranges::any_of(places, [&](const LinearPlace& place) {
          return matches_module(place.name, {name}) &&
                 !inside_modules(place.name, config.modules_to_save);
        })) {
      continue;
    }
    throw InputError(
        kLoraWhere,
        "target_modules: \"" + shortened(name, 200) + "\" " +
            (exists(name) ? "is no linear layer, or is in modules_to_save" : "matches nothing"),
        "names of linear layers: " + layer_names(places));
  }
}

/// The tensors of an adapter's file, by PEFT's names, as the model has them.
static NamedTensors adapter_tensors(const torch::nn::Module& model,
                                    const std::vector<std::string>& saved) {
  NamedTensors tensors;
  for (const auto& item : model.named_parameters()) {
    const std::string& name = item.key();
    const std::string module = name.substr(0, name.rfind('.'));
    if (matches_module(module, {"lora_A", "lora_B"}) || inside_modules(module, saved)) {
      tensors[kAdapterPrefix + name] = item.value().detach();
    }
  }
  return tensors;
}

/// The weight of an adapted layer itself, which PEFT writes for output layers: "….base_layer.weight".
static at::Tensor base_weight(const torch::OrderedDict<std::string, at::Tensor>& parameters,
                              const std::string& name) {
  constexpr std::string_view kBase = ".base_layer.";
  const std::string prefix = kAdapterPrefix;
  const size_t at = name.find(kBase);
  if (at == std::string::npos || !name.starts_with(prefix)) {
    return {};
  }
  const at::Tensor* found = parameters.find(name.substr(prefix.size(), at - prefix.size()) + "." +
                                            name.substr(at + kBase.size()));
  return found == nullptr ? at::Tensor() : *found;
}

/// The layers of an adapter's file, in the order of their names.
static std::vector<std::string> adapted_layers(const SafetensorsReader& reader) {
  const std::string prefix = kAdapterPrefix;
  std::set<std::string> layers;
  for (const std::string& name : reader.names()) {
    if (const size_t end = name.rfind(".lora_A.weight");
        end != std::string::npos && name.starts_with(prefix)) {
      layers.insert(name.substr(prefix.size(), end - prefix.size()));
    }
  }
  return {layers.begin(), layers.end()};
}

/// The number of the block in a layer's name; -1: none.
static int64_t block_of(const std::string& layer) {
  const auto parts = split(layer, ".");
  for (size_t i = parts.size() - 1; i-- > 2;) {
    if (const auto number = parse_number<int64_t>(parts[i])) {
      return *number;
    }
  }
  return -1;
}

/// Whether Python's re.fullmatch would find it; also for a pattern that only Python has.
static bool matches_pattern(const std::string& layer, const std::string& pattern) {
  try {
    return std::regex_match(layer, std::regex(pattern));
  } catch (const std::regex_error&) {
    return true;
  }
}

/// PEFT gives no adapter to layers that these options leave out, whatever the file has.
static void require_targets(const std::filesystem::path& file, const nlohmann::json& json,
                            const SafetensorsReader& reader) {
  const auto refuse = [&](const char* key, const std::string& layer) {
    throw InputError(kAdapterWhere,
                     file.string() + ": " + key + "=" + json.at(key).dump().substr(0, 200) +
                         " leaves out " + layer + ", which the weights have",
                     "the options with which the adapter was trained");
  };
  const auto targets = json.value("target_modules", nlohmann::json());
  const bool pattern = targets.is_string() && targets != kAllLinear;
  const auto blocks = json.value("layers_to_transform", nlohmann::json());
  if (!(targets.is_null() || targets.is_string() || targets.is_array()) ||
      (!blocks.is_null() && !blocks.is_array() && !blocks.is_number_integer())) {
    throw InputError(kAdapterWhere,
                     file.string() + ": target_modules=" + targets.dump().substr(0, 200) +
                         ", layers_to_transform=" + blocks.dump().substr(0, 200),
                     "names or a pattern, and numbers");
  }
  const auto excluded = json.value("exclude_modules", nlohmann::json());
  for (const std::string& layer : adapted_layers(reader)) {
    const int64_t block = block_of(layer);
    if (blocks.is_number()
            ? blocks != block
            : !blocks.empty() && std::find(blocks.begin(), blocks.end(), block) == blocks.end()) {
      refuse("layers_to_transform", layer);
    }
    if (pattern && !matches_pattern(layer, targets.get<std::string>())) {
      refuse("target_modules", layer);
    }
    if (excluded.is_array() && matches_module(layer, excluded.get<std::vector<std::string>>())) {
      refuse("exclude_modules", layer);
    }
  }
}

template <typename T>
static T adapter_value(const nlohmann::json& json, const char* key, T fallback,
                       const std::string& file) {
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) {
    return fallback;
  }
  try {
    return found->template get<T>();
  } catch (const nlohmann::json::exception&) {
    throw InputError("models::LoraConfig",
                     file + ": " + key + "=" + found->dump().substr(0, 200) + " has another type");
  }
}

static void merge_places(torch::nn::Module& model, bool merged, const char* where) {
  const at::NoGradGuard no_grad;
  const auto places = require_adapter(model, where);
  for (const LinearPlace& place : places) {
    if (place.weight.dim() != 2 ||
        place.module->named_children()["lora_B"]->named_parameters()["weight"].size(0) !=
            place.out()) {
      throw InputError(where, "the weight of " + place.name + " is a shard", "whole parameters",
                       "call it in Accelerator::summon_full_params");
    }
  }
  for (const LinearPlace& place : places) {
    const auto mark = lora_mark(place.weight);
    if (!mark || mark->merged == merged) {
      continue;
    }
    const auto a = mark->a.lock();
    const auto b = mark->b.lock();
    at::Tensor update = at::mm(b->weight, a->weight) * (merged ? mark->scaling : -mark->scaling);
    update = place.fan_in_fan_out ? update.t() : update;
    at::Tensor weight = place.weight;
    weight.copy_(weight.to(update.scalar_type()) + update);
    mark->merged = merged;
  }
}

} // namespace detail

void LoraConfig::validate() const {
  const auto require = [](bool good, const std::string& what, const char* expected) {
    if (!good) {
      throw InputError("models::LoraConfig", what, expected);
    }
  };
  require(r >= 1, "r=" + std::to_string(r), "at least 1");
  require(std::isfinite(lora_alpha) && lora_alpha > 0, "lora_alpha=" + format_digits(lora_alpha),
          "a positive number");
  require(lora_dropout >= 0 && lora_dropout < 1, "lora_dropout=" + format_digits(lora_dropout),
          "from 0 to below 1");
}

double LoraConfig::scaling() const {
  return lora_alpha / (use_rslora ? std::sqrt(static_cast<double>(r)) : static_cast<double>(r));
}

bool LoraConfig::is_adapter(const std::filesystem::path& folder) {
  std::error_code ignored;
  return std::filesystem::exists(folder / detail::kAdapterConfig, ignored);
}

std::string LoraConfig::base_of(const std::filesystem::path& folder) {
  const std::string base = from_pretrained(folder).base_model_name_or_path;
  std::error_code ignored;
  std::filesystem::path path;
  try {
    path = base.empty() ? path : pretrained_folder(base);
  } catch (const InputError&) { // the error below names the adapter
  }
  if (!std::filesystem::exists(path / "config.json", ignored) || is_adapter(path)) {
    throw InputError("models::LoraConfig",
                     (folder / detail::kAdapterConfig).string() +
                         ": base_model_name_or_path=" + shortened(base, 500) +
                         (is_adapter(path) ? " is an adapter" : " is not there"),
                     "the model that the adapter was trained on",
                     "put it there, or write its folder into that file");
  }
  return base;
}

LoraConfig LoraConfig::from_pretrained(const std::filesystem::path& folder) {
  const auto path = folder / detail::kAdapterConfig;
  const std::string file = path.string();
  const nlohmann::json json = read_json_file("models::LoraConfig", path);
  const auto value = [&](const char* key, auto fallback) {
    return detail::adapter_value(json, key, fallback, file);
  };
  const std::string type = json.is_object() ? value("peft_type", std::string()) : "";
  if (type != "LORA") {
    throw InputError("models::LoraConfig", file + ": peft_type=" + shortened(type, 100), "LORA");
  }
  detail::check_known_keys("models::pretrained", file, "adapter_config.json", "*", json,
                           "merge it into its base with PEFT");
  LoraConfig config;
  config.r = value("r", config.r);
  config.lora_alpha = value("lora_alpha", config.lora_alpha);
  config.lora_dropout = value("lora_dropout", config.lora_dropout);
  config.use_rslora = value("use_rslora", false);
  config.fan_in_fan_out = value("fan_in_fan_out", false);
  config.base_model_name_or_path = value("base_model_name_or_path", std::string());
  config.task_type = value("task_type", std::string());
  config.modules_to_save = value("modules_to_save", std::vector<std::string>());
  // A pattern has no list, and these options leave out some that match: load_adapter() takes the
  // layers from the file.
  const bool some =
      json.contains("layers_to_transform") && !json.at("layers_to_transform").is_null();
  const bool excluded = json.contains("exclude_modules") && !json.at("exclude_modules").empty();
  if (const auto targets = json.find("target_modules");
      targets != json.end() && targets->is_array() && !some && !excluded) {
    config.target_modules = value("target_modules", std::vector<std::string>());
  }
  config.validate();
  return config;
}

LoraConfig get_peft_model(const std::shared_ptr<torch::nn::Module>& model, LoraConfig config) {
  if (!model) {
    throw InputError(detail::kLoraWhere, "model=null", "a model");
  }
  config.validate();
  detail::untie_adapted(*model, config);
  const auto places = detail::linear_places(*model);
  if (std::ranges::any_of(places, detail::is_adapted)) {
    throw InputError(detail::kLoraWhere, "the model has an adapter", "a model without one",
                     "call merge_and_unload first");
  }
  for (const detail::LinearPlace& place : places) {
    if (place.weight.is_inference()) {
      throw InputError(detail::kLoraWhere,
                       "the weight of " + place.name + " is an inference tensor",
                       "a model that was made outside c10::InferenceMode");
    }
  }
  detail::complete_config(*model, places, config);
  detail::require_names(*model, places, config);
  for (auto& parameter : model->named_parameters()) {
    parameter.value().requires_grad_(
        detail::inside_modules(parameter.key(), config.modules_to_save));
  }
  config.fan_in_fan_out = false;
  for (const detail::LinearPlace& place : places) {
    if (!detail::matches_module(place.name, config.target_modules) ||
        detail::inside_modules(place.name, config.modules_to_save)) {
      continue;
    }
    const at::NoGradGuard no_grad;
    const auto made = [&](int64_t in, int64_t out) {
      torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
      linear->options.in_features(in).out_features(out);
      linear->weight.set_data(at::zeros({out, in}, place.weight.options().dtype(at::kFloat)));
      linear->train(place.module->is_training());
      return linear;
    };
    const auto a = made(place.in(), config.r);
    torch::nn::init::kaiming_uniform_(a->weight, std::sqrt(5.0));
    detail::adapt_layer(place, a, made(config.r, place.out()), config.scaling(),
                        config.lora_dropout);
    config.fan_in_fan_out = config.fan_in_fan_out || place.fan_in_fan_out;
  }
  return config;
}

void save_adapter(const torch::nn::Module& model, const LoraConfig& config,
                  const std::filesystem::path& folder) {
  constexpr const char* kWhere = "models::save_adapter";
  std::vector<std::string> targets = config.target_modules; // empty: it was a pattern
  for (const detail::LinearPlace& place : detail::require_adapter(model, kWhere)) {
    if (config.target_modules.empty()) {
      targets.push_back(place.name);
    }
    if (const auto mark = detail::lora_mark(place.weight); !mark || mark->merged) {
      throw InputError(kWhere, "the adapter is merged",
                       "an adapter that is not merged into its base", "call unmerge_adapter first");
    }
  }
  const nlohmann::json json = {
      {"peft_type", "LORA"},
      {"task_type", config.task_type.empty() ? nlohmann::json() : nlohmann::json(config.task_type)},
      {"base_model_name_or_path", config.base_model_name_or_path},
      {"r", config.r},
      {"lora_alpha", config.lora_alpha},
      {"lora_dropout", config.lora_dropout},
      {"target_modules", targets},
      {"modules_to_save",
       config.modules_to_save.empty() ? nlohmann::json() : nlohmann::json(config.modules_to_save)},
      {"use_rslora", config.use_rslora},
      {"use_dora", false},
      {"fan_in_fan_out", config.fan_in_fan_out},
      {"bias", "none"},
      {"init_lora_weights", true},
      {"inference_mode", true}};
  write_file_atomically(folder / detail::kAdapterConfig, json.dump(2) + "\n");
  write_safetensors(folder / detail::kAdapterWeights,
                    detail::adapter_tensors(model, config.modules_to_save));
}

LoraConfig load_adapter(const std::shared_ptr<torch::nn::Module>& model,
                        const std::filesystem::path& folder) {
  LoraConfig config = LoraConfig::from_pretrained(folder);
  const SafetensorsReader reader(folder / detail::kAdapterWeights);
  const std::string file = reader.path().string();
  const auto options = folder / detail::kAdapterConfig;
  const nlohmann::json json = read_json_file(detail::kAdapterWhere, options);
  detail::require_targets(options, json, reader);
  if (detail::adapted_places(*model).empty()) {
    // Without the option the family's layers are adapted.
    if (config.target_modules.empty() &&
        !json.value("target_modules", nlohmann::json()).is_null()) {
      config.target_modules = detail::adapted_layers(reader);
    }
    try {
      config = get_peft_model(model, config);
    } catch (const InputError& error) {
      throw InputError(detail::kAdapterWhere,
                       folder.string() + " does not fit the model: " + std::string(error.text()),
                       "an adapter of this model");
    }
  }
  std::vector<std::string> problems;
  auto tensors = detail::adapter_tensors(*model, config.modules_to_save);
  for (const auto& [name, tensor] : tensors) {
    if (!reader.contains(name)) {
      problems.push_back("missing: " + name);
    } else if (const auto& entry = reader.entry(name);
               at::IntArrayRef(entry.shape) != tensor.sizes() || !at::isFloatingType(entry.dtype)) {
      problems.push_back(name + " " + c10::str(at::IntArrayRef(entry.shape)) + " instead of " +
                         c10::str(tensor.sizes()));
    }
  }
  const auto parameters = model->named_parameters();
  for (const std::string& name : reader.names()) {
    if (tensors.contains(name)) {
      continue;
    }
    const at::Tensor base = detail::base_weight(parameters, name);
    if (!base.defined()) {
      problems.push_back("unexpected: " + name);
    } else if (const at::Tensor there = reader.read(name).to(base.options());
               there.sizes() != base.sizes() || !at::equal(there, base)) {
      problems.push_back(name + " differs from the model's weight");
    }
  }
  if (!problems.empty()) {
    throw InputError(detail::kAdapterWhere,
                     file + " does not fit the model: " + joined(first_items(problems, 6), "; "),
                     "an adapter of this model with r=" + std::to_string(config.r));
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : tensors) {
    tensor.copy_(reader.read(name));
  }
  return config;
}

void merge_adapter(torch::nn::Module& model) {
  detail::merge_places(model, true, "models::merge_adapter");
}

void unmerge_adapter(torch::nn::Module& model) {
  detail::merge_places(model, false, "models::unmerge_adapter");
}

void merge_and_unload(torch::nn::Module& model) {
  detail::merge_places(model, true, "models::merge_and_unload");
  for (const detail::LinearPlace& place : detail::adapted_places(model)) {
    detail::release_layer(place);
  }
  for (at::Tensor& parameter : model.parameters()) {
    parameter.requires_grad_(true);
  }
}

void cast_frozen_weights(torch::nn::Module& model, at::ScalarType dtype) {
  for (const detail::LinearPlace& place : detail::linear_places(model)) {
    for (at::Tensor tensor : {place.weight, place.bias}) {
      if (tensor.defined() && !tensor.requires_grad()) {
        tensor.set_data(tensor.to(dtype));
      }
    }
  }
}

std::pair<int64_t, int64_t> get_nb_trainable_parameters(const torch::nn::Module& model) {
  std::pair<int64_t, int64_t> count{0, 0};
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : model.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      count.first += parameter.requires_grad() ? parameter.numel() : 0;
      count.second += parameter.numel();
    }
  }
  return count;
}

} // namespace hasten
