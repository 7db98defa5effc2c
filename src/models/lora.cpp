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

/// Python's re.fullmatch. Throws InputError for a pattern that only Python has.
static bool matches_pattern(const char* key, const std::string& pattern, const std::string& name) {
  try {
    if (pattern.size() > 2000) { // std::regex takes stack for each parenthesis
      throw std::regex_error(std::regex_constants::error_complexity);
    }
    return std::regex_match(name, std::regex(pattern));
  } catch (const std::regex_error& error) {
    throw InputError("models::LoraConfig",
                     std::string(key) + ": " + shortened(pattern, 200) + ": " + error.what(),
                     "a regular expression that std::regex has, too");
  }
}

// PEFT's get_pattern_key.
template <typename Value>
Value value_of_pattern(const char* key, const std::map<std::string, Value>& patterns,
                       const std::string& module, Value otherwise) {
  const auto found = std::ranges::find_if(patterns, [&](const auto& each) {
    return matches_pattern(key, "(.*\\.)?(" + each.first + ")", module);
  });
  return found == patterns.end() ? otherwise : found->second;
}

// PEFT's check_target_module_exists. The number of a block is the first one after two names.
static bool is_target(const std::string& module, const LoraConfig& config) {
  static const std::regex number(R"(.*?\.[^.]*\.(\d+)\..*)");
  const auto& layers = config.layers_to_transform;
  std::smatch found;
  return !matches_module(module, config.exclude_modules) &&
         !inside_modules(module, config.modules_to_save) &&
         (std::ranges::count(config.target_modules, module) > 0 ||
          (matches_module(module, config.target_modules) &&
           (layers.empty() ||
            (std::regex_match(module, found, number) &&
             std::ranges::count(layers, parse_number<int64_t>(found.str(1))) > 0))));
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
  return lora_mark(place.weight, place.embedding) != nullptr;
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
  auto names = config.modules_to_save;
  names.insert(names.end(), config.target_modules.begin(), config.target_modules.end());
  if (!tied.output.empty() &&
      (inside_modules(tied.output, names) || inside_modules(tied.embeddings, names))) {
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
                     "names of linear layers and embeddings: " + layer_names(places),
                     "or \"all-linear\"");
  }
  if (config.target_modules == std::vector<std::string>{kAllLinear}) {
    config.target_modules.clear();
    for (const LinearPlace& place : places) {
      if (place.name != head && !place.embedding &&
          !inside_modules(place.name, config.modules_to_save)) {
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
    throw InputError(kLoraWhere,
                     "target_modules: \"" + shortened(name, 200) + "\" " +
                         (exists(name) ? "is no linear layer or embedding, or is in modules_to_save"
                                       : "matches nothing"),
                     "names of linear layers and embeddings: " + layer_names(places));
  }
  if (std::ranges::none_of(places, [&](const auto& at) { return is_target(at.name, config); })) {
    throw InputError(kLoraWhere, "exclude_modules and layers_to_transform leave out all layers",
                     "at least one of " + joined(config.target_modules));
  }
}

/// The tensors of an adapter's file, by PEFT's names, as the model has them.
static NamedTensors adapter_tensors(const torch::nn::Module& model, const LoraConfig& config) {
  NamedTensors tensors;
  const auto parameters = model.named_parameters();
  for (const auto& item : parameters) {
    std::string name = item.key();
    const std::string module = name.substr(0, name.rfind('.'));
    const bool adapted = parameters.contains(module + ".lora_A.weight");
    if (matches_module(module, {"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})) {
      name = module; // a parameter in PEFT
    } else if (!matches_module(module, {"lora_A", "lora_B"}) &&
               !inside_modules(module, config.modules_to_save)) {
      if (!("." + name).ends_with(".bias") || config.bias == "none" ||
          (config.bias == "lora_only" && !adapted)) {
        continue;
      }
      name = adapted ? module + ".base_layer.bias" : name;
    }
    tensors[kAdapterPrefix + name] = item.value().detach();
  }
  return tensors;
}

/// The weight of an adapted layer itself in an adapter's file: "….base_layer.weight".
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

/// Puts names of layers in place of PEFT's patterns, which are strings in the file.
static void take_patterns(const torch::nn::Module& model, const nlohmann::json& json,
                          LoraConfig& config) {
  for (auto [key, names] : {std::pair("target_modules", &config.target_modules),
                            std::pair("exclude_modules", &config.exclude_modules)}) {
    const auto pattern = json.value(key, nlohmann::json());
    if (!pattern.is_string()) {
      continue;
    }
    for (const LinearPlace& place : linear_places(model)) {
      if (matches_pattern(key, pattern.get<std::string>(), place.name)) {
        names->push_back(place.name);
      }
    }
    if (names->empty()) { // all-linear, or an error that has it
      names->push_back(pattern);
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
  require(bias == "none" || bias == "all" || bias == "lora_only", "bias=" + shortened(bias, 100),
          "none, all or lora_only");
  for (const auto& [pattern, rank] : rank_pattern) {
    detail::matches_pattern("rank_pattern", pattern, "");
    require(rank >= 1, "rank_pattern: " + pattern + "=" + std::to_string(rank), "at least 1");
  }
  for (const auto& [pattern, alpha] : alpha_pattern) {
    detail::matches_pattern("alpha_pattern", pattern, "");
    require(std::isfinite(alpha) && alpha > 0,
            "alpha_pattern: " + pattern + "=" + format_digits(alpha), "a positive number");
  }
  require(
      layers_to_transform.empty() || target_modules != std::vector<std::string>{detail::kAllLinear},
      "layers_to_transform with target_modules=all-linear", "names of layers");
}

int64_t LoraConfig::rank(const std::string& module) const {
  return detail::value_of_pattern("rank_pattern", rank_pattern, module, r);
}

double LoraConfig::scaling(const std::string& module) const {
  const auto of = static_cast<double>(rank(module));
  return detail::value_of_pattern("alpha_pattern", alpha_pattern, module, lora_alpha) /
         (use_rslora ? std::sqrt(of) : of);
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
  nlohmann::json json = read_json_file("models::LoraConfig", path);
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
  config.use_dora = value("use_dora", false);
  config.bias = value("bias", config.bias);
  config.rank_pattern = value("rank_pattern", config.rank_pattern);
  config.alpha_pattern = value("alpha_pattern", config.alpha_pattern);
  config.fan_in_fan_out = value("fan_in_fan_out", false);
  config.base_model_name_or_path = value("base_model_name_or_path", std::string());
  config.task_type = value("task_type", std::string());
  config.modules_to_save = value("modules_to_save", std::vector<std::string>());
  if (auto& blocks = json["layers_to_transform"]; blocks.is_number_integer()) {
    blocks = std::vector{value("layers_to_transform", int64_t{0})};
  }
  config.layers_to_transform = value("layers_to_transform", config.layers_to_transform);
  for (auto [key, names] : {std::pair("target_modules", &config.target_modules),
                            std::pair("exclude_modules", &config.exclude_modules)}) {
    *names = json[key].is_string() ? *names : value(key, *names); // load_adapter() reads patterns
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
        detail::inside_modules(parameter.key(), config.modules_to_save) ||
        (config.bias == "all" && ("." + parameter.key()).ends_with(".bias")));
  }
  config.fan_in_fan_out = false;
  for (const detail::LinearPlace& place : places) {
    if (!detail::is_target(place.name, config)) {
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
    const int64_t rank = config.rank(place.name);
    const auto a = made(place.in(), rank);
    torch::nn::init::kaiming_uniform_(a->weight, std::sqrt(5.0));
    const auto b = made(rank, place.out());
    if (place.embedding) { // as in PEFT, A is 0 at first
      torch::nn::init::zeros_(a->weight);
      torch::nn::init::normal_(b->weight);
    }
    detail::adapt_layer(place, a, b, config.scaling(place.name), config.lora_dropout,
                        config.use_dora);
    if (config.bias == "lora_only" && place.bias.defined()) {
      at::Tensor(place.bias).requires_grad_(true);
    }
    config.fan_in_fan_out = config.fan_in_fan_out || (place.fan_in_fan_out && !place.embedding);
  }
  return config;
}

void save_adapter(const torch::nn::Module& model, const LoraConfig& config,
                  const std::filesystem::path& folder) {
  constexpr const char* kWhere = "models::save_adapter";
  std::vector<std::string> targets = config.target_modules; // empty: it was a pattern
  auto tensors = detail::adapter_tensors(model, config);
  const std::vector<std::string> names{"embed_tokens", "lm_head"};
  const auto named = [&](const auto& name) { return std::ranges::count(targets, name) > 0; };
  for (const detail::LinearPlace& place : detail::require_adapter(model, kWhere)) {
    if (config.target_modules.empty()) {
      targets.push_back(place.name);
    }
    if (detail::lora_mark(place.weight, place.embedding)->merged) {
      throw InputError(kWhere, "the adapter is merged",
                       "an adapter that is not merged into its base", "call unmerge_adapter first");
    }
    // PEFT's save_embedding_layers="auto". A weight that was cast to 16 bits is not the base's.
    if (std::ranges::any_of(names, named) && detail::matches_module(place.name, names) &&
        place.weight.scalar_type() == at::kFloat) {
      tensors[detail::kAdapterPrefix + place.name + ".base_layer.weight"] = place.weight.detach();
    }
  }
  const auto or_null = [](const auto& list) {
    return list.empty() ? nlohmann::json() : nlohmann::json(list);
  };
  const nlohmann::json json = {{"peft_type", "LORA"},
                               {"task_type", or_null(config.task_type)},
                               {"base_model_name_or_path", config.base_model_name_or_path},
                               {"r", config.r},
                               {"lora_alpha", config.lora_alpha},
                               {"lora_dropout", config.lora_dropout},
                               {"target_modules", targets},
                               {"exclude_modules", or_null(config.exclude_modules)},
                               {"layers_to_transform", or_null(config.layers_to_transform)},
                               {"modules_to_save", or_null(config.modules_to_save)},
                               {"rank_pattern", config.rank_pattern},
                               {"alpha_pattern", config.alpha_pattern},
                               {"use_rslora", config.use_rslora},
                               {"use_dora", config.use_dora},
                               {"fan_in_fan_out", config.fan_in_fan_out},
                               {"bias", config.bias},
                               {"init_lora_weights", true},
                               {"inference_mode", true}};
  write_file_atomically(folder / detail::kAdapterConfig, json.dump(2) + "\n");
  write_safetensors(folder / detail::kAdapterWeights, tensors);
}

LoraConfig load_adapter(const std::shared_ptr<torch::nn::Module>& model,
                        const std::filesystem::path& folder) {
  LoraConfig config = LoraConfig::from_pretrained(folder);
  const SafetensorsReader reader(folder / detail::kAdapterWeights);
  const std::string file = reader.path().string();
  const nlohmann::json json =
      read_json_file(detail::kAdapterWhere, folder / detail::kAdapterConfig);
  if (detail::adapted_places(*model).empty()) {
    try {
      detail::take_patterns(*model, json, config);
      config = get_peft_model(model, config);
    } catch (const InputError& error) {
      throw InputError(detail::kAdapterWhere,
                       folder.string() + " does not fit the model: " + std::string(error.text()),
                       "an adapter of this model");
    }
  }
  std::vector<std::string> problems;
  auto tensors = detail::adapter_tensors(*model, config);
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
    if (tensors.contains(name) || name.find(".original_module.") != std::string::npos ||
        name.find(".modules_to_save.") != std::string::npos) { // bias=all has some biases thrice
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
                     "an adapter of this model, of the layers that target_modules, exclude_modules "
                     "and layers_to_transform name, with r=" +
                         std::to_string(config.r) + " and rank_pattern");
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : tensors) {
    tensor.copy_(reader.read(name));
  }
  return config;
}

void merge_adapter(torch::nn::Module& model) {
  constexpr const char* kWhere = "models::merge_adapter";
  detail::merge_places(detail::require_adapter(model, kWhere), true, kWhere);
}

void unmerge_adapter(torch::nn::Module& model) {
  constexpr const char* kWhere = "models::unmerge_adapter";
  detail::merge_places(detail::require_adapter(model, kWhere), false, kWhere);
}

void merge_and_unload(torch::nn::Module& model) {
  constexpr const char* kWhere = "models::merge_and_unload";
  const auto places = detail::require_adapter(model, kWhere);
  detail::merge_places(places, true, kWhere);
  std::ranges::for_each(places, detail::release_layer);
  for (at::Tensor& parameter : model.parameters()) {
    parameter.requires_grad_(true);
  }
}

void cast_frozen_weights(torch::nn::Module& model, at::ScalarType dtype) {
  for (const detail::LinearPlace& place : detail::linear_places(model)) {
    const auto mark = detail::lora_mark(place.weight); // DoRA reads the weight's norm, too
    const bool exact = place.embedding || (mark && !mark->magnitude.expired());
    for (at::Tensor tensor : {place.weight, place.bias}) {
      if (tensor.defined() && !exact && !tensor.requires_grad()) {
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
