// Folders with a changed key, file or tensor give the results of transformers and PEFT, or an error that
// names it (tests/golden/keys.json, by tools/check_keys.py --golden).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "golden_family.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/models/generation.h"
#include "hasten/models/lora.h"
#include "hasten/text/tokenizer.h"
#include "small_family.h"
#include "support/temporary_folder.h"

namespace hasten::changed_keys_test {

using namespace testing_support;
namespace fs = std::filesystem;

static const fs::path kGolden = fs::path(kFamiliesGoldenFile).parent_path();

static ModelTask task_of(const std::string& name) {
  return name == "CausalLM"                 ? ModelTask::causal_lm
         : name == "MaskedLM"               ? ModelTask::masked_lm
         : name == "SequenceClassification" ? ModelTask::sequence_classification
                                            : ModelTask::token_classification;
}

static void write(const fs::path& path, const nlohmann::json& json) {
  write_file_atomically(path, json.dump());
}

/// The weights of a case of families.py; a copy of tied ones is not among them.
static NamedTensors weights_of(const std::string& name) {
  PreTrainedModel model = golden_model(name);
  NamedTensors weights;
  for (const auto& parameter : model->named_parameters()) {
    weights[parameter.key()] = parameter.value().detach();
  }
  return weights;
}

/// By the formula of check_keys.py. `base`: the weights of the adapted model.
static NamedTensors adapter_weights(const nlohmann::json& shapes, const NamedTensors& base) {
  NamedTensors weights;
  for (const auto& [name, shape] : shapes.items()) {
    std::string plain = name.substr(std::string_view("base_model.model.").size());
    if (const size_t at = plain.find(".base_layer"); at != std::string::npos) {
      weights[name] = base.at(plain.erase(at, std::string_view(".base_layer").size()));
      continue;
    }
    const auto sizes = shape.get<std::vector<int64_t>>();
    const int64_t count = c10::multiply_integers(sizes);
    weights[name] = (golden_bits("adapter." + plain, count).to(at::kDouble) / 4294967296.0 - 0.5)
                        .to(at::kFloat)
                        .view(sizes);
  }
  return weights;
}

/// A folder of the case before the change.
static void make_folder(const nlohmann::json& of, const fs::path& folder) {
  fs::create_directories(folder);
  for (const auto& [name, json] : of.at("files").items()) {
    write(folder / name, json);
  }
  if (of.contains("tokenizer") && of.at("tokenizer").is_string()) {
    const auto json = read_json_file(
        "test", kGolden / "tokenizers" / (of.at("tokenizer").get<std::string>() + ".json"));
    if (of.value("style", "") != "files") {
      write(folder / "tokenizer.json", json);
    }
  }
  if (of.at("kind") == "encode") {
    return;
  }
  const std::string model = of.at("model");
  if (of.at("kind") == "adapter") {
    fs::create_directories(folder / "base");
    write(folder / "base" / "config.json", golden_json(model));
    const NamedTensors base = weights_of(model);
    write_safetensors(folder / "base" / "model.safetensors", base);
    write_safetensors(folder / "adapter_model.safetensors",
                      adapter_weights(of.at("tensors"), base));
    auto options = of.at("files").at("adapter_config.json");
    options["base_model_name_or_path"] = (folder / "base").string();
    write(folder / "adapter_config.json", options);
    return;
  }
  write_safetensors(folder / "model.safetensors", weights_of(model));
}

static void change_json(const nlohmann::json& change, nlohmann::json& json) {
  nlohmann::json* at = &json;
  const auto& path = change.at("path");
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    at = path[i].is_number() ? &(*at)[path[i].get<size_t>()] : &(*at)[path[i].get<std::string>()];
  }
  const auto& last = path.back();
  if (change.contains("delete")) {
    last.is_number() ? at->erase(last.get<size_t>())
                     : static_cast<void>(at->erase(last.get<std::string>()));
  } else if (last.is_number()) {
    (*at)[last.get<size_t>()] = change.at("value");
  } else {
    (*at)[last.get<std::string>()] = change.at("value");
  }
}

static void apply(const nlohmann::json& change, const fs::path& folder) {
  if (change.contains("files")) {
    for (const auto& [name, json] : change.at("files").items()) {
      json.is_null() ? static_cast<void>(fs::remove(folder / name)) : write(folder / name, json);
    }
  } else if (change.contains("tensors")) {
    NamedTensors weights = SafetensorsReader(folder / "model.safetensors").read_all();
    for (const auto& step : change.at("tensors")) {
      const std::string name = step.at("name");
      if (step.at("scale").is_null()) {
        weights.erase(name);
        continue;
      }
      const std::string from = step.at("from");
      weights[name] =
          weights.at(from) * step.at("scale").get<double>() + step.at("shift").get<double>();
    }
    write_safetensors(folder / "model.safetensors", weights);
  } else {
    const fs::path path = folder / change.at("file").get<std::string>();
    auto json = read_json_file("test", path);
    change_json(change, json);
    write(path, json);
  }
}

static nlohmann::json encoded(const fs::path& folder, const nlohmann::json& texts) {
  const auto tokenizer = AutoTokenizer::from_pretrained(folder);
  nlohmann::json ids = nlohmann::json::array();
  for (const auto& text : texts) {
    ids.push_back(tokenizer.encode(text.get<std::string>()).ids);
  }
  return ids;
}

static nlohmann::json generated(const nlohmann::json& of, const fs::path& folder,
                                const nlohmann::json& prompts) {
  GenerationConfig config = GenerationConfig::from_pretrained(folder.string());
  if (!of.at("max_new_tokens").is_null() && config.max_new_tokens == 0 && config.max_length == 0) {
    config.max_new_tokens = of.at("max_new_tokens");
  }
  nlohmann::json ids = nlohmann::json::array();
  for (const auto& prompt : prompts) { // max_length counts a padded prompt's tokens in transformers
    PreTrainedModel model = model_from_pretrained(folder.string(), ModelTask::causal_lm);
    ids.push_back(generate(model, {prompt.get<std::vector<int64_t>>()}, config)[0]);
  }
  return ids;
}

/// The first logits of tokens that are no padding.
static at::Tensor first_logits(const nlohmann::json& of, const fs::path& folder, int64_t count) {
  const torch::NoGradGuard no_grad;
  PreTrainedModel model = model_from_pretrained(folder.string(), task_of(of.at("task")));
  model->eval();
  PreTrainedModel pristine = golden_model(of.at("model"));
  ModelInputs inputs = golden_batch(0, pristine);
  inputs.labels = at::Tensor();
  at::Tensor logits = model->forward(inputs).logits;
  if (logits.dim() == 3) {
    logits = logits.index({inputs.attention_mask.to(at::kBool)});
  }
  return logits.flatten().slice(0, 0, count);
}

static std::string problem(const nlohmann::json& of, const nlohmann::json& change,
                           const nlohmann::json& golden, const fs::path& folder) {
  const nlohmann::json& expected = change.at("expected");
  try {
    const std::string kind = of.at("kind");
    if (kind == "encode" || kind == "generate") {
      const nlohmann::json ids = kind == "encode" ? encoded(folder, golden.at("texts"))
                                                  : generated(of, folder, golden.at("prompts"));
      return expected == "error" ? "the reference refuses it" : ids == expected ? "" : ids.dump();
    }
    if (expected == "error") {
      first_logits(of, folder, 1);
      return "the reference refuses it";
    }
    const auto numbers = expected.get<std::vector<float>>();
    const at::Tensor theirs = at::tensor(numbers);
    const at::Tensor ours = first_logits(of, folder, theirs.size(0));
    const double limit = 2e-5 * std::max(1.0, theirs.abs().max().item<double>());
    return (ours - theirs).abs().max().item<double>() <= limit ? "" : c10::str(ours);
  } catch (const InputError& error) {
    const std::string text = error.what();
    const auto names = change.at("names").get<std::vector<std::string>>();
    const bool named = std::ranges::any_of(names, [&](const std::string& name) {
      return text.find(name.substr(name.rfind('.') + 1)) != std::string::npos;
    });
    return expected == "error" || named ? "" : text;
  }
}

TEST(ChangedKeys, GiveTheReferencesResultOrAnErrorThatNamesThem) {
  const OneThread one_thread;
  std::string logged; // what is unknown
  set_log_sink([&](LogLevel, std::string_view line) { logged += line; });
  const auto golden = read_json_file("test", kGolden / "keys.json");
  std::map<std::string, int> results;
  for (const auto& change : golden.at("changes")) {
    const auto& of = golden.at("cases").at(change.at("case").get<std::string>());
    const TemporaryFolder folder;
    make_folder(of, folder.path());
    apply(change, folder.path());
    const std::string found = problem(of, change, golden, folder.path());
    const std::string last = change.at("names").back();
    EXPECT_TRUE(found.empty() || logged.find(last) != std::string::npos)
        << found << "\n"
        << nlohmann::json(change).dump().substr(0, 500);
    logged.clear();
    ++results[of.at("kind").get<std::string>() +
              (change.at("expected") == "error" ? " refused" : " computed")];
  }
  set_log_sink({});
  for (const char* kind : {"logits computed", "logits refused", "encode computed", "encode refused",
                           "generate computed", "adapter computed", "adapter refused"}) {
    EXPECT_GE(results[kind], 5) << kind;
  }
}

} // namespace hasten::changed_keys_test
