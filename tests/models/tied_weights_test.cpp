// Files that have a tied weight twice, under another name, or with other values.
#include <gtest/gtest.h>

#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/lora.h"
#include "small_family.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::tied_weights_test {

using namespace testing_support;

/// A folder of a language model whose tensors can be changed.
struct LanguageModelFolder {
  explicit LanguageModelFolder(const std::string& type, bool tied = true)
      : task(type == "bert" || type == "roberta" ? ModelTask::masked_lm : ModelTask::causal_lm) {
    torch::manual_seed(1);
    PreTrainedConfig config = small_config(type);
    auto options = nlohmann::json::parse(config.other_keys);
    options["tie_word_embeddings"] = tied;
    config.other_keys = options.dump();
    model = model_from_config(config, task);
    model->eval();
    model->save_pretrained(folder.path());
    weights = SafetensorsReader(folder / "model.safetensors").read_all();
  }
  PreTrainedModel load() {
    write_safetensors(folder / "model.safetensors", weights);
    PreTrainedModel loaded = model_from_pretrained(folder.path().string(), task);
    loaded->eval();
    return loaded;
  }
  at::Tensor logits(PreTrainedModel of) {
    const torch::NoGradGuard no_grad;
    return of->forward({ids}).logits;
  }

  ModelTask task;
  TemporaryFolder folder{};
  PreTrainedModel model{nullptr};
  NamedTensors weights{};
  at::Tensor ids = torch::arange(2, 18).view({2, 8});
};

TEST(TiedWeights, AnOutputLayerWithOtherValuesIsNotTied) {
  for (const auto& [type, words] :
       {std::pair{"qwen2", "model.embed_tokens.weight"}, {"gpt2", "transformer.wte.weight"}}) {
    SCOPED_TRACE(type);
    LanguageModelFolder files(type);
    files.weights["lm_head.weight"] = files.weights[words].clone();
    PreTrainedModel tied = files.load();
    EXPECT_TRUE(tied->loading_info().report.empty()) << "a copy is no news";
    EXPECT_TRUE(torch::equal(files.logits(tied), files.logits(files.model)));

    files.weights["lm_head.weight"] *= 2;
    PreTrainedModel untied = files.load();
    EXPECT_TRUE(torch::allclose(files.logits(untied), 2 * files.logits(files.model)));
    ASSERT_EQ(untied->loading_info().report.size(), 1u);
    EXPECT_NE(untied->loading_info().report[0].find("lm_head.weight is not tied"),
              std::string::npos);
    // Saved, it is the same model.
    const TemporaryFolder again;
    untied->save_pretrained(again.path());
    PreTrainedModel reloaded = model_from_pretrained(again.path().string(), files.task);
    EXPECT_TRUE(torch::equal(files.logits(reloaded), files.logits(untied)));

    files.weights["lm_head.weight"] /= 2;
    files.weights.erase(words); // the output layer's name alone
    EXPECT_TRUE(torch::equal(files.logits(files.load()), files.logits(files.model)));
  }
}

TEST(TiedWeights, AnEncodersOutputLayerMustBeTiedWhereItIsUsed) {
  for (const auto& [type, output, words] :
       {std::tuple{"bert", "cls.predictions.decoder.weight",
                   "bert.embeddings.word_embeddings.weight"},
        {"roberta", "lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"}}) {
    LanguageModelFolder files(type);
    files.weights[output] = files.weights[words].clone();
    EXPECT_TRUE(torch::equal(files.logits(files.load()), files.logits(files.model)));
    files.weights[output] *= 2;
    const std::string error = error_of([&] { files.load(); });
    EXPECT_NE(error.find(output), std::string::npos) << error;
    files.task = ModelTask::sequence_classification;
    EXPECT_EQ(error_of([&] { files.load(); }), "") << "a classifier has no such layer";
  }
}

TEST(TiedWeights, ABiasMayHaveTheNameOfTheDecoder) {
  LanguageModelFolder files("bert");
  files.weights["cls.predictions.bias"].normal_();
  const at::Tensor expected = files.logits(files.load());
  files.weights["cls.predictions.decoder.bias"] = files.weights["cls.predictions.bias"];
  EXPECT_TRUE(torch::equal(files.logits(files.load()), expected)) << "both names";
  files.weights.erase("cls.predictions.bias");
  PreTrainedModel loaded = files.load();
  EXPECT_TRUE(torch::equal(files.logits(loaded), expected)) << "its name alone";
  EXPECT_TRUE(loaded->loading_info().missing_keys.empty());
  files.weights["cls.predictions.bias"] = files.weights["cls.predictions.decoder.bias"] + 1;
  EXPECT_NE(error_of([&] { files.load(); }).find("cls.predictions.bias\" occurs twice"),
            std::string::npos);
}

TEST(TiedWeights, ASavedModelKeepsTheOptionsOfGeneration) {
  LanguageModelFolder files("llama", false);
  const std::string text = R"({"eos_token_id": [3, 5], "somebody's": {"b": 1, "a": 2}})";
  write_file_atomically(files.folder / "generation_config.json", text);
  const TemporaryFolder saved;
  files.load()->save_pretrained(saved.path());
  EXPECT_EQ(read_file(saved / "generation_config.json"), text);
}

// PEFT writes the base's matrix of an adapted output layer, too.
TEST(TiedWeights, TheBaseOfAnAdaptedOutputLayerIsComparedWithTheModels) {
  LanguageModelFolder files("qwen2");
  const TemporaryFolder folder;
  const LoraConfig config =
      get_peft_model(files.model.ptr(), {.r = 2, .target_modules = {"lm_head"}});
  save_adapter(*files.model, config, folder.path());
  auto tensors = SafetensorsReader(folder / "adapter_model.safetensors").read_all();
  const std::string base = "base_model.model.lm_head.base_layer.weight";
  tensors[base] = files.weights["model.embed_tokens.weight"].clone();
  write_safetensors(folder / "adapter_model.safetensors", tensors);
  PreTrainedModel loaded = files.load();
  load_adapter(loaded.ptr(), folder.path());
  EXPECT_TRUE(torch::equal(files.logits(loaded), files.logits(files.model)));
  tensors[base] *= 2;
  write_safetensors(folder / "adapter_model.safetensors", tensors);
  EXPECT_NE(
      error_of([&] { load_adapter(files.load().ptr(), folder.path()); }).find(base + " differs"),
      std::string::npos);
}

TEST(TiedWeights, ActivationsHaveTheNamesOfTransformers) {
  for (const auto& [alias, name] : {std::pair{"gelu_pytorch_tanh", "gelu_new"},
                                    {"gelu_fast", "gelu_new"},
                                    {"gelu_python", "gelu"},
                                    {"swish", "silu"}}) {
    LanguageModelFolder files("llama", false);
    auto json = read_json_file("test", files.folder / "config.json");
    const auto with = [&](const char* activation) {
      json["hidden_act"] = activation;
      write_file_atomically(files.folder / "config.json", json.dump());
      return files.load();
    };
    PreTrainedModel aliased = with(alias);
    EXPECT_EQ(aliased->config().to_json().at("hidden_act"), alias) << "saved as it was";
    EXPECT_TRUE(torch::equal(files.logits(aliased), files.logits(with(name)))) << alias;
  }
}

} // namespace hasten::tied_weights_test
