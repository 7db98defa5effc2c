// The files of adapters are PEFT's, and those that do not fit are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "foreign_model.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/lora.h"
#include "small_family.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::adapter_files_test {

using namespace testing_support;

static void write_config(const std::filesystem::path& folder, const nlohmann::json& json) {
  write_file_atomically(folder / "adapter_config.json", json.dump());
}

class AdapterFiles : public testing::Test {
 protected:
  OneThread one_thread_{};
  TemporaryFolder folder_{};
};

TEST_F(AdapterFiles, ASavedAdapterHasPeftsNamesAndLoads) {
  torch::manual_seed(5);
  PreTrainedModel model = model_from_config(small_config("qwen2"), ModelTask::causal_lm);
  const TemporaryFolder base;
  model->save_pretrained(base.path());
  const LoraConfig config = get_peft_model(
      model.ptr(),
      {.r = 2,
       .target_modules = {"q_proj", "v_proj", "embed_tokens"}, // the last is in no block
       .exclude_modules = {"2.self_attn.q_proj"},
       .layers_to_transform = {1, 2},
       .rank_pattern = {{"1.*q_proj", 3}},
       .alpha_pattern = {{"q_proj", 5}},
       .bias = "lora_only",
       .use_dora = true});
  fill_adapter(*model);
  save_adapter(*model, config, folder_.path());
  const auto names = SafetensorsReader(folder_ / "adapter_model.safetensors").names();
  EXPECT_EQ(
      std::ranges::count_if(
          names, [](const std::string& name) { return name.ends_with("q_proj.lora_A.weight"); }),
      1);
  const std::string layer = "base_model.model.model.layers.1.self_attn.v_proj.";
  for (const char* name : {"lora_B.weight", "lora_magnitude_vector", "base_layer.bias"}) {
    EXPECT_EQ(std::ranges::count(names, layer + name), 1) << name;
  }
  PreTrainedModel other = model_from_pretrained(base.path().string(), ModelTask::causal_lm);
  const LoraConfig read = load_adapter(other.ptr(), folder_.path());
  EXPECT_EQ(read.rank_pattern, config.rank_pattern);
  EXPECT_EQ(read.layers_to_transform, config.layers_to_transform);
  const ModelInputs inputs = small_inputs(2, 6);
  EXPECT_TRUE(at::equal(other->logits(inputs), model->logits(inputs)));

  // Python's patterns name the same layers.
  auto json = read_json_file("test", folder_ / "adapter_config.json");
  json["layers_to_transform"] = nullptr;
  json["exclude_modules"] = R"(.*\.2\..*q_proj)";
  json["target_modules"] = R"((?!.*layers\.0).*(q_proj|v_proj))";
  write_config(folder_.path(), json);
  PreTrainedModel again = model_from_pretrained(base.path().string(), ModelTask::causal_lm);
  EXPECT_EQ(load_adapter(again.ptr(), folder_.path()).target_modules.size(), 4u);
  EXPECT_TRUE(at::equal(again->logits(inputs), model->logits(inputs)));
}

TEST_F(AdapterFiles, ASavedAdapterLoadsIntoItsBase) {
  PreTrainedModel model =
      model_from_config(small_config("bert"), ModelTask::sequence_classification);
  const auto start = model->named_parameters();
  const LoraConfig config =
      get_peft_model(model.ptr(), {.r = 3, .base_model_name_or_path = "base"});
  EXPECT_EQ(config.modules_to_save, std::vector<std::string>{"classifier"});
  EXPECT_EQ(config.task_type, "SEQ_CLS");
  fill_adapter(*model);
  save_adapter(*model, config, folder_.path());

  PreTrainedModel other =
      model_from_config(small_config("bert"), ModelTask::sequence_classification);
  {
    const at::NoGradGuard no_grad;
    for (auto& parameter : other->named_parameters()) {
      if (!parameter.key().starts_with("classifier")) { // that is in the adapter's file
        parameter.value().copy_(start[parameter.key()]);
      }
    }
  }
  const LoraConfig read = load_adapter(other.ptr(), folder_.path());
  EXPECT_EQ(read.r, 3);
  EXPECT_EQ(read.base_model_name_or_path, "base");
  const ModelInputs inputs = small_inputs(2, 6);
  EXPECT_TRUE(at::equal(other->logits(inputs), model->logits(inputs)));
}

TEST_F(AdapterFiles, AnAdapterThatDoesNotFitIsRefusedByName) {
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto load = [&](const nlohmann::json& json) {
    write_config(folder_.path(), json);
    return error_of([&] { load_adapter(foreign_model().ptr(), folder_.path()); });
  };
  has(load({{"peft_type", "IA3"}}), "peft_type=IA3. Expected LORA");
  has(load({{"peft_type", "LORA"}, {"lora_bias", true}}), "lora_bias=true");
  has(load({{"peft_type", "LORA"}, {"layers_pattern", "h"}}), "layers_pattern=\"h\"");
  has(load({{"peft_type", "LORA"}, {"trainable_token_indices", {1}}}), "trainable_token_indices=");
  has(load({{"peft_type", "LORA"}, {"rank_pattern", {{std::string(100'000, '('), 1}}}}),
      "rank_pattern: (((");
  has(load({{"peft_type", "LORA"}, {"layers_to_transform", {"a"}}}), "layers_to_transform=[\"a\"]");
  has(load({{"peft_type", "LORA"}, {"bias", "some"}}),
      "bias=some. Expected none, all or lora_only");
  has(load({{"peft_type", "LORA"}, {"rank_pattern", {{"2", 0}}}}), "rank_pattern: 2=0");
  has(load({{"peft_type", "LORA"}, {"alpha_pattern", {{"(?<=a)2", 1}}}}),
      "alpha_pattern: (?<=a)2: ");
  has(load({{"peft_type", "LORA"}, {"init_lora_weights", "pissa"}}), "init_lora_weights=\"pissa\"");
  has(load({{"peft_type", "LORA"}, {"r", "many"}}), "r=\"many\" has another type");

  auto model = foreign_model();
  const LoraConfig config = get_peft_model(model.ptr(), {.r = 2, .target_modules = {"2"}});
  save_adapter(*model, config, folder_.path());
  torch::nn::Sequential wider(torch::nn::Linear(12, 20), torch::nn::ReLU(),
                              torch::nn::Linear(20, 24));
  has(error_of([&] { load_adapter(wider.ptr(), folder_.path()); }),
      "base_model.model.2.lora_B.weight [20, 2] instead of [24, 2]");
  const nlohmann::json some = read_json_file("test", folder_.path() / "adapter_config.json");
  for (const auto& [key, value, said] : // PEFT would not load what the file has
       {std::tuple<const char*, nlohmann::json, const char*>{
            "exclude_modules", {"2"}, "exclude_modules and layers_to_transform leave out all"},
        {"target_modules", {"4"}, "unexpected: base_model.model.2.lora_A.weight"},
        {"target_modules", "encoder\\..*", "\"encoder\\..*\" matches nothing"}}) {
    nlohmann::json without = some;
    without[key] = value;
    write_config(folder_.path(), without);
    has(error_of([&] { load_adapter(foreign_model().ptr(), folder_.path()); }), said);
  }
  write_config(folder_.path(), some);
  torch::nn::Sequential shorter(torch::nn::Linear(12, 20));
  has(error_of([&] { load_adapter(shorter.ptr(), folder_.path()); }), "\"2\" matches nothing");
  auto other = foreign_model();
  get_peft_model(other.ptr(), {.r = 2, .target_modules = {"4"}});
  const std::string targets = error_of([&] { load_adapter(other.ptr(), folder_.path()); });
  has(targets, "missing: base_model.model.4.lora_A.weight");
  has(targets, "unexpected: base_model.model.2.lora_A.weight");
}

} // namespace hasten::adapter_files_test
