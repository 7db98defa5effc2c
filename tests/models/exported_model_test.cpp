// A folder that hasten.export wrote is a model of its own family.
#include <filesystem>

#include "exported/exported_rig.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/core/deferred_init.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/step_memory.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::exported_test {

using testing_support::error_of;
using Classifier = AutoModelForSequenceClassification;

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
