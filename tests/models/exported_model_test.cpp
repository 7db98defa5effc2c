// A folder that hasten.export wrote is a model of its own family.
#include <filesystem>

#include "exported/exported_rig.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/core/deferred_init.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/lora.h"
#include "hasten/models/step_memory.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::exported_test {

using testing_support::error_of;
using Classifier = AutoModelForSequenceClassification;

/// Copies the parameters that both have.
static void load_equal_parameters(torch::nn::Module& to, const torch::nn::Module& from) {
  const at::NoGradGuard no_grad;
  auto own = to.named_parameters();
  for (const auto& parameter : from.named_parameters()) {
    if (Tensor* found = own.find(parameter.key())) {
      found->copy_(parameter.value());
    }
  }
}

static ModelInputs inputs_of(const GoldenCase& golden) {
  return {.input_ids = golden.in.at("input_ids"), .attention_mask = golden.in.at("attention_mask")};
}

TEST(ExportedModel, TheFoldersLogitsLossesAndFilesAreThoseOfItsGraph) {
  const GoldenCase golden = golden_case("reader/0");
  PreTrainedModel model = Classifier::from_pretrained(golden_path("reader"));
  EXPECT_EQ(model->loading_info().report, std::vector<std::string>());
  EXPECT_EQ(model->blocks().size(), 2u);
  EXPECT_EQ(model->output_layer(), "classifier");
  ModelInputs inputs = inputs_of(golden);
  inputs.labels = at::tensor({0, 2, 1}, at::kLong);
  const ModelOutput output = model->forward(inputs);
  EXPECT_LE(relative_difference(output.logits, golden.out.at("logits")), 1e-5);
  EXPECT_LE(relative_difference(output.loss,
                                at::cross_entropy_loss(golden.out.at("logits"), inputs.labels)),
            1e-5);
  output.loss.backward();
  for (const Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(parameter.grad().defined());
  }

  const testing_support::TemporaryFolder folder;
  model->save_pretrained(folder.path());
  const auto saved = read_json_file("test", folder.path() / "config.json");
  const auto original = read_json_file("test", golden_path("reader/config.json"));
  for (const auto& [key, value] : original.items()) {
    EXPECT_EQ(saved.at(key), value) << key; // "window" too, which hasten does not know
  }
  PreTrainedModel again = Classifier::from_pretrained(folder.path().string());
  EXPECT_TRUE(again->forward(inputs_of(golden)).logits.equal(output.logits));
}

TEST(ExportedModel, OtherLabelsHaveANewLastLayer) {
  const GoldenCase golden = golden_case("reader/0");
  PreTrainedModel model =
      Classifier::from_pretrained(golden_path("reader"), {.id2label = {{"no", "yes"}}});
  EXPECT_TRUE(model->loading_info().new_output);
  EXPECT_EQ(model->forward(inputs_of(golden)).logits.sizes(), (std::vector<int64_t>{3, 2}));
  const testing_support::TemporaryFolder folder;
  model->save_pretrained(folder.path());
  EXPECT_EQ(ExportedModule::load(folder.path())->forward(golden.in).at("logits").size(1), 2);
  PreTrainedModel again = Classifier::from_pretrained(folder.path().string());
  EXPECT_EQ(again->config().id2label, (std::vector<std::string>{"no", "yes"}));
  EXPECT_TRUE(
      again->forward(inputs_of(golden)).logits.equal(model->forward(inputs_of(golden)).logits));
}

TEST(ExportedModel, ItIsDeferredAndItsMemoryIsEstimated) {
  const GoldenCase golden = golden_case("reader/0");
  PreTrainedModel model =
      deferred_init([] { return Classifier::from_pretrained(golden_path("reader")); });
  EXPECT_TRUE(is_deferred(*model));
  materialize(*model);
  EXPECT_LE(relative_difference(model->forward(inputs_of(golden)).logits, golden.out.at("logits")),
            1e-5);
  const StepMemory memory = step_memory(model->config(), 4, 8, GradientPlace::existing, at::kFloat,
                                        ModelTask::sequence_classification);
  EXPECT_GT(memory.peak_bytes, 4 * 8 * 6 * 4);
}

TEST(ExportedModel, ALanguageModelsLossNeedsNoLogitsAndIsThatOfItsLogits) {
  const GoldenCase golden = golden_case("writer/0");
  PreTrainedModel model = AutoModelForCausalLM::from_pretrained(golden_path("writer"));
  ModelInputs inputs{.input_ids = golden.in.at("input_ids"),
                     .position_ids = golden.in.at("position_ids")};
  inputs.labels = inputs.input_ids;
  EXPECT_LE(relative_difference(model->logits(inputs), golden.out.at("logits")), 1e-5);
  const auto losses =
      at::cross_entropy_loss(golden.out.at("logits").flatten(0, 1),
                             shifted_labels(inputs.labels).flatten(), {}, at::Reduction::None);
  const LinearCrossEntropy loss = model->causal_loss(inputs);
  EXPECT_LE(relative_difference(loss.token_losses.flatten(), losses), 1e-5);
  EXPECT_NE(std::string(loss.loss_sum.grad_fn()->name()).find("SlicedLoss"), std::string::npos)
      << loss.loss_sum.grad_fn()->name(); // linear_cross_entropy's own node
  inputs.logits_to_keep = 2;
  EXPECT_LE(relative_difference(model->logits(inputs), golden.out.at("logits").slice(1, -2)), 1e-5);

  // Without positions a row is one text, and padding on either side changes none of its logits.
  const Tensor ids = inputs.input_ids.slice(0, 1, 2);
  const Tensor alone = model->logits({.input_ids = ids});
  EXPECT_TRUE(alone.allclose(golden.out.at("logits").slice(0, 1, 2), 1e-5, 1e-6));
  const Tensor padded = at::cat({at::zeros({1, 2}, at::kLong), ids}, 1);
  EXPECT_TRUE(model->logits({.input_ids = padded, .attention_mask = padded.cumsum(1).ne(0)})
                  .slice(1, 2)
                  .allclose(alone, 1e-5, 1e-6));
}

TEST(ExportedModel, RowsArePackedWhereTheGraphKeepsTheTextsApart) {
  PreTrainedModel apart = AutoModelForCausalLM::from_pretrained(golden_path("writer"));
  EXPECT_TRUE(apart->supports_packing());
  EXPECT_TRUE(apart->is_training()); // as before
  EXPECT_FALSE(
      AutoModelForCausalLM::from_pretrained(golden_path("mixing_writer"))->supports_packing());
}

TEST(ExportedModel, ATiedWeightIsReadUnderEachOfItsNames) {
  PreTrainedModel model = AutoModelForCausalLM::from_pretrained(golden_path("writer"));
  EXPECT_EQ(model->named_parameters().contains("head.weight"), false);
  const testing_support::TemporaryFolder folder;
  model->save_pretrained(folder.path());
  NamedTensors weights = SafetensorsReader(folder.path() / "model.safetensors").read_all();
  weights["head.weight"] = weights.extract("writer.words.weight").mapped();
  write_safetensors(folder.path() / "model.safetensors", weights);
  PreTrainedModel again = AutoModelForCausalLM::from_pretrained(folder.path().string());
  EXPECT_EQ(again->loading_info().report, std::vector<std::string>());
  EXPECT_TRUE(again->named_parameters()["writer.words.weight"].equal(weights["head.weight"]));
}

TEST(ExportedModel, LoraAdaptsItsLinearLayers) {
  const GoldenCase golden = golden_case("writer/0");
  const ModelInputs inputs{.input_ids = golden.in.at("input_ids"),
                           .position_ids = golden.in.at("position_ids")};
  PreTrainedModel model = AutoModelForCausalLM::from_pretrained(golden_path("writer"));
  const LoraConfig chosen =
      get_peft_model(model.ptr(), {.r = 2, .bias = "lora_only", .use_dora = true});
  EXPECT_EQ(chosen.target_modules, std::vector<std::string>{"c_attn"});
  EXPECT_TRUE(chosen.fan_in_fan_out);
  const Tensor base = model->logits(inputs);
  EXPECT_LE(relative_difference(base, golden.out.at("logits")), 1e-5); // B is 0
  {
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->named_parameters()) {
      if (parameter.key().find("lora_B") != std::string::npos) {
        parameter.value().fill_(0.1);
      }
    }
  }
  const Tensor adapted = model->logits(inputs);
  EXPECT_GT(relative_difference(adapted, base), 1e-2);
  adapted.sum().backward();
  for (const auto& parameter : model->named_parameters()) {
    const bool lora = parameter.key().find("lora_") != std::string::npos ||
                      parameter.key().ends_with("c_attn.bias");
    EXPECT_EQ(parameter.value().grad().defined(), lora) << parameter.key();
  }

  // With torch's operators, too, and merged into the weights.
  ExportedModule graph =
      ExportedModule::load(golden_path("writer/model.pt2"), {.substitutions = false});
  get_peft_model(graph.ptr(), {.r = 2, .target_modules = {"c_attn", "out"}, .use_dora = true});
  load_equal_parameters(*graph, *model);
  EXPECT_LE(relative_difference(graph->forward(golden.in).at("logits"), adapted), 1e-5);
  merge_and_unload(*model);
  EXPECT_LE(relative_difference(model->logits(inputs), adapted), 1e-5);
  EXPECT_FALSE(model->named_parameters().contains("writer.layer.0.c_attn.lora_A.weight"));
}

TEST(ExportedModel, WhatItsGraphLacksIsRefused) {
  const std::string folder = golden_path("reader");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "golden-reader has no head for MaskedLM",
                      error_of<InputError>([&] { AutoModelForMaskedLM::from_pretrained(folder); }));
  const testing_support::TemporaryFolder other;
  for (const char* file : {"config.json", "model.pt2", "model.safetensors"}) {
    std::filesystem::copy(std::filesystem::path(folder) / file, other.path() / file);
  }
  auto config = read_json_file("test", other.path() / "config.json");
  config["model_type"] = "golden-other";
  config["architectures"] = {"ReaderModel"};
  write_file_atomically(other.path() / "config.json", config.dump());
  EXPECT_PRED_FORMAT2(
      testing::IsSubstring, "architectures=[\"ReaderModel\"]",
      error_of<InputError>([&] { Classifier::from_pretrained(other.path().string()); }));
}

} // namespace hasten::exported_test
