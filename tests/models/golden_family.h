// The models and batches of tools/golden/families.py: the same formulas.
#pragma once

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "golden_folder.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/auto_model.h"

namespace hasten::testing_support {

constexpr int64_t kGoldenVocab = 48;
constexpr int64_t kGoldenLabels = 3;

inline const SafetensorsReader& golden_families() {
  static const SafetensorsReader reader(kFamiliesGoldenFile);
  return reader;
}

/// The names of the cases.
inline std::vector<std::string> golden_cases() {
  std::vector<std::string> names;
  for (const auto& [name, config] : golden_families().metadata()) {
    if (name != "made_with") {
      names.push_back(name);
    }
  }
  return names;
}

/// The case's config.json.
inline nlohmann::json golden_json(const std::string& name) {
  return nlohmann::json::parse(golden_families().metadata().at(name));
}

inline PreTrainedConfig golden_config(const std::string& name) {
  return PreTrainedConfig::from_json(golden_json(name), name);
}

inline ModelTask golden_task(const PreTrainedConfig& config) {
  return config.has_head(ModelTask::sequence_classification) ? ModelTask::sequence_classification
         : config.has_head(ModelTask::token_classification)  ? ModelTask::token_classification
         : config.has_head(ModelTask::causal_lm)             ? ModelTask::causal_lm
                                                             : ModelTask::masked_lm;
}

/// `count` 32-bit numbers that follow from a name, as int64.
inline at::Tensor golden_bits(const std::string& name, int64_t count) {
  uint32_t seed = 2166136261U;
  for (const char byte : name) {
    seed = (seed ^ static_cast<uint8_t>(byte)) * 16777619U;
  }
  const at::Tensor bits = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = seed + static_cast<uint32_t>(i) * 0x9E3779B9U;
    x = (x ^ (x >> 16)) * 0x7FEB352DU;
    x = (x ^ (x >> 15)) * 0x846CA68BU;
    bits.mutable_data_ptr<int64_t>()[i] = x ^ (x >> 16);
  }
  return bits;
}

inline void fill_golden(torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    at::Tensor& values = parameter.value();
    at::Tensor drawn =
        golden_bits(parameter.key(), values.numel()).to(at::kDouble) / 4294967296.0 - 0.5;
    if (values.dim() == 1) {
      drawn = drawn * 0.2 + (parameter.key().ends_with("weight") ? 1 : 0);
    }
    values.copy_(drawn.view_as(values));
  }
}

inline PreTrainedModel golden_model(const std::string& name) {
  const PreTrainedConfig config = golden_config(name);
  PreTrainedModel model = model_from_config(config, golden_task(config));
  fill_golden(*model);
  return model;
}

/// Batch 0 is that of the logits; batches 1 to 10 are those of the steps.
inline ModelInputs golden_batch(int64_t number, PreTrainedModel& model) {
  const std::vector<int64_t> lengths = number == 0       ? std::vector<int64_t>{13, 3, 16, 1}
                                       : number % 2 == 1 ? std::vector<int64_t>{5, 12, 8, 12}
                                                         : std::vector<int64_t>{16, 2, 9, 4};
  const auto rows = static_cast<int64_t>(lengths.size());
  const int64_t width = *std::max_element(lengths.begin(), lengths.end());
  const auto draw = [&](const char* what, int64_t high, at::IntArrayRef size) {
    const std::string name = "batch" + std::to_string(number) + "." + what;
    return golden_bits(name, c10::multiply_integers(size)).remainder(high).view(size);
  };
  const at::Tensor text = at::arange(width) < at::tensor(lengths).unsqueeze(1);
  const PreTrainedConfig& config = model->config();
  const at::Tensor ids = draw("ids", kGoldenVocab - 8, {rows, width}) + 8;
  ModelInputs inputs{at::where(text, ids, at::full_like(ids, config.pad_token_id)),
                     text.to(at::kLong)};
  const at::Tensor none = at::full_like(ids, -100);
  if (model->task() == ModelTask::token_classification) {
    inputs.labels = at::where(text, draw("tokens", kGoldenLabels, {rows, width}), none);
  } else if (model->task() == ModelTask::causal_lm) {
    inputs.labels = at::where(text, inputs.input_ids, none);
  } else if (model->task() == ModelTask::masked_lm) {
    at::Tensor chosen = text & (draw("chosen", 3, {rows, width}) == 0);
    chosen.select(1, 0).fill_(true);
    inputs.labels = at::where(chosen, draw("words", kGoldenVocab, {rows, width}), none);
  } else if (config.problem_type == "regression") {
    inputs.labels = draw("numbers", 100, {rows}) / 32.0;
  } else if (config.problem_type == "multi_label_classification") {
    inputs.labels = draw("sets", 2, {rows, kGoldenLabels}).to(at::kFloat);
  } else {
    inputs.labels = draw("classes", kGoldenLabels, {rows});
  }
  return inputs;
}

} // namespace hasten::testing_support
