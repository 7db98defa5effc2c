#include "hasten/models/auto_model.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "golden_folder.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"
#include "support/environment.h"
#include "support/error_of.h"
#include "support/hub_cache.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::kBertGoldenFolder;
using testing_support::TemporaryFolder;

static NamedTensors golden_weights() {
  return SafetensorsReader(std::string(kBertGoldenFolder) + "/model.safetensors").read_all();
}

// A folder with the golden configuration and `weights`.
class BertFolderOnDisk {
 public:
  explicit BertFolderOnDisk(const NamedTensors& weights) {
    std::filesystem::copy(std::string(kBertGoldenFolder) + "/config.json", folder_ / "config.json");
    write_safetensors(folder_ / "model.safetensors", weights);
  }
  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }
  PreTrainedModel load(const FromPretrainedOptions& options = {}) const {
    return AutoModelForSequenceClassification::from_pretrained(folder_.path().string(), options);
  }
  std::string error() const {
    try {
      load();
    } catch (const InputError& error) {
      return error.what();
    }
    return {};
  }

 private:
  TemporaryFolder folder_;
};

static void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

static void expect_equal_weights(PreTrainedModel model, const NamedTensors& weights,
                                 bool classifier = true) {
  for (const auto& parameter : model->named_parameters()) {
    if (classifier || parameter.key().find("classifier") == std::string::npos) {
      EXPECT_TRUE(torch::equal(parameter.value(), weights.at(parameter.key()))) << parameter.key();
    }
  }
}

TEST(BertPretrained, SavedFolderIsTheLoadedOneByteForByte) {
  const TemporaryFolder folder;
  auto loaded = AutoModelForSequenceClassification::from_pretrained(kBertGoldenFolder);
  EXPECT_TRUE(loaded->loading_info().report.empty());
  EXPECT_FALSE(loaded->loading_info().new_output);
  EXPECT_TRUE(loaded->is_training());
  FolderCommit commit(folder / "model");
  loaded->save_pretrained(commit.folder());
  commit.commit();
  verify_manifest(folder / "model");
  const std::string golden = kBertGoldenFolder;
  EXPECT_EQ(read_file(folder / "model" / "model.safetensors"),
            read_file(golden + "/model.safetensors"));
  auto ours = nlohmann::json::parse(read_file(folder / "model" / "config.json"));
  auto theirs = nlohmann::json::parse(read_file(golden + "/config.json"));
  theirs.erase("transformers_version"); // only their file has it
  EXPECT_EQ(ours, theirs);
}

TEST(BertPretrained, BareEncoderWithLegacyNamesGetsAFreshClassifier) {
  NamedTensors weights;
  for (const auto& [full_name, tensor] : golden_weights()) {
    std::string name = full_name;
    if (name.rfind("bert.", 0) == 0) {
      name = name.substr(5);
      const auto at = name.find("LayerNorm.");
      if (at != std::string::npos) {
        name = name.substr(0, at + 10) + (name.substr(at + 10) == "weight" ? "gamma" : "beta");
      }
      weights[name] = tensor;
    }
  }
  weights["embeddings.position_ids"] = torch::arange(40);
  weights["cls.predictions.bias"] = torch::zeros({101});
  const BertFolderOnDisk folder(weights);
  const auto loaded = folder.load({.id2label = {{"a", "b", "c", "d"}}});
  expect_equal_weights(loaded, golden_weights(), false);
  EXPECT_TRUE(loaded->loading_info().new_output);
  EXPECT_EQ(loaded->named_parameters()["classifier.weight"].size(0), 4);
  EXPECT_NEAR(loaded->named_parameters()["classifier.weight"].std().item<double>(), 0.3, 0.1);
  ASSERT_EQ(loaded->loading_info().report.size(), 3u);
  expect_contains(loaded->loading_info().report[0], "the classifier is new");
  expect_contains(loaded->loading_info().report[1], "cls.predictions.bias");
  expect_contains(loaded->loading_info().report[2], "ignored buffers");
  expect_contains(loaded->loading_info().report[2], "embeddings.position_ids");
}

// Weights that are all random, all from a file, or partly each.
TEST(BertPretrained, DeferredModelsHaveTheSameWeights) {
  auto weights = golden_weights();
  weights.erase("bert.pooler.dense.weight");
  weights.erase("bert.pooler.dense.bias");
  const BertFolderOnDisk partial(weights);
  const std::vector<std::function<PreTrainedModel()>> loads = {
      [] {
        return AutoModelForSequenceClassification::from_pretrained("bert-mini",
                                                                   {.vocab_size = 300});
      },
      [] { return AutoModelForSequenceClassification::from_pretrained(kBertGoldenFolder); },
      [&] { return partial.load(); }};
  for (const auto& load : loads) {
    set_seed(4);
    const auto plain = load();
    const at::Tensor next = torch::rand({3});
    set_seed(4);
    const auto deferred = deferred_init([&] { return load(); }, {.resident_bytes = 0});
    EXPECT_TRUE(torch::equal(next, torch::rand({3})));
    EXPECT_TRUE(is_deferred(deferred->named_parameters()["classifier.weight"]));
    materialize(*deferred);
    const auto wanted = plain->named_parameters();
    for (const auto& parameter : deferred->named_parameters()) {
      EXPECT_TRUE(torch::equal(parameter.value(), wanted[parameter.key()])) << parameter.key();
    }
  }
}

TEST(BertPretrained, EncoderWithoutPoolerGetsOne) {
  auto weights = golden_weights();
  weights.erase("bert.pooler.dense.weight");
  weights.erase("bert.pooler.dense.bias");
  const auto loaded = BertFolderOnDisk(weights).load();
  EXPECT_FALSE(loaded->loading_info().new_output);
  expect_contains(loaded->loading_info().report.at(0), "the pooler is new");
}

TEST(BertPretrained, OtherLabelsGetAFreshClassifierAndReorderedOnesTheirRows) {
  const BertFolderOnDisk folder(golden_weights());
  set_seed(1);
  const auto a = folder.load({.id2label = {{"no", "yes"}}});
  set_seed(1);
  const auto b = folder.load({.id2label = {{"no", "yes"}}});
  EXPECT_TRUE(a->loading_info().new_output);
  expect_contains(a->loading_info().report.at(0), "bad, fair, good");
  EXPECT_EQ(a->config().id2label.size(), 2u);
  EXPECT_TRUE(torch::equal(a->named_parameters()["classifier.weight"],
                           b->named_parameters()["classifier.weight"]));

  const auto turned = folder.load({.id2label = {{"good", "bad", "fair"}}});
  EXPECT_FALSE(turned->loading_info().new_output);
  const auto weight = golden_weights().at("classifier.weight");
  EXPECT_TRUE(torch::equal(turned->named_parameters()["classifier.weight"][0], weight[2]));
  EXPECT_TRUE(torch::equal(turned->named_parameters()["classifier.weight"][1], weight[0]));
  EXPECT_EQ(turned->config().id2label[0], "good");
}

TEST(BertPretrained, SizesAreComparedBeforeAnythingIsAllocated) {
  install_memory_meter();
  const auto weights = golden_weights();
  struct Case {
    const char* key;
    int64_t value;
    const char* part;
  };
  const Case cases[] = {
      {"vocab_size", 4'000'000, "larger than the folder's weights: vocab_size=4"},
      {"vocab_size", 100'000'000, "larger than the folder's weights: vocab_size=100000000"},
      {"vocab_size", 100'000'001, "vocab_size=100000001. Expected 1 to 100000000"},
      {"intermediate_size", 4'000'000, "intermediate_size=4000000"},
      {"max_position_embeddings", 4'000'000, "larger than the folder's weights"},
      {"type_vocab_size", 4'000'000, "larger than the folder's weights"},
      {"num_hidden_layers", 3000, "num_hidden_layers=3000"},
      {"num_hidden_layers", 4, "missing: bert.encoder.layer.3."},
  };
  for (const Case& bad : cases) {
    const BertFolderOnDisk folder(weights);
    auto config = nlohmann::json::parse(read_file(folder / "config.json"));
    config[bad.key] = bad.value;
    write_file_atomically(folder / "config.json", config.dump());
    reset_peak_memory();
    const int64_t before = memory_stats().peak_bytes;
    expect_contains(folder.error(), bad.part);
    EXPECT_LT(memory_stats().peak_bytes - before, 1'000'000) << bad.part;
  }
}

TEST(BertPretrained, EveryMissingUnexpectedAndWronglyShapedTensorIsNamed) {
  auto weights = golden_weights();
  const std::string layer = "bert.encoder.layer.1.";
  weights.erase(layer + "output.dense.bias");
  weights.erase("bert.pooler.dense.bias");
  weights["bert.encoder.layer.3.output.dense.bias"] = torch::zeros({32});
  weights[layer + "intermediate.dense.weight"] = torch::zeros({32, 64});
  weights[layer + "intermediate.dense.bias"] = torch::zeros({64}, torch::kInt);
  const auto message = BertFolderOnDisk(weights).error();
  expect_contains(message, "missing: " + layer + "output.dense.bias, bert.pooler.dense.bias");
  expect_contains(message, "unexpected: bert.encoder.layer.3.output.dense.bias");
  expect_contains(message, layer + "intermediate.dense.weight F32[32, 64] instead of [64, 32]");
  expect_contains(message, layer + "intermediate.dense.bias I32[64]");

  weights = golden_weights();
  weights["embeddings.LayerNorm.gamma"] = torch::ones({32});
  expect_contains(BertFolderOnDisk(weights).error(), "occurs twice");
}

TEST(BertPretrained, HalfWeightsBecomeFloat) {
  auto weights = golden_weights();
  for (auto& [name, tensor] : weights) {
    tensor = tensor.to(torch::kBFloat16);
  }
  const auto loaded = BertFolderOnDisk(weights).load();
  for (const auto& parameter : loaded->named_parameters()) {
    EXPECT_EQ(parameter.value().scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(parameter.value(), weights.at(parameter.key()).to(torch::kFloat)));
  }
  EXPECT_EQ(loaded->config().dtype, "float32");
}

TEST(BertPretrained, ShardedFilesAreJoined) {
  const BertFolderOnDisk folder(golden_weights());
  std::filesystem::remove(folder / "model.safetensors");
  NamedTensors parts[2];
  nlohmann::json map;
  for (const auto& [name, tensor] : golden_weights()) {
    const int part = static_cast<int>(map.size() % 2);
    parts[part][name] = tensor;
    map[name] = "part" + std::to_string(part) + ".safetensors";
  }
  for (int part = 0; part < 2; ++part) {
    write_safetensors(folder / ("part" + std::to_string(part) + ".safetensors"), parts[part]);
  }
  const auto index = folder / "model.safetensors.index.json";
  std::ofstream(index) << nlohmann::json({{"weight_map", map}});
  expect_equal_weights(folder.load(), golden_weights());

  const std::string moved = map.begin().key();
  map[moved] = "part1.safetensors";
  std::ofstream(index) << nlohmann::json({{"weight_map", map}});
  expect_contains(folder.error(), "\"" + moved + "\" is missing in part1");
  map[moved] = "part0.safetensors";
  map["x"] = "../elsewhere.safetensors";
  std::ofstream(index) << nlohmann::json({{"weight_map", map}});
  expect_contains(folder.error(), "../elsewhere");
  std::filesystem::remove(folder / "part1.safetensors");
  map.erase("x");
  std::ofstream(index) << nlohmann::json({{"weight_map", map}});
  expect_contains(folder.error(), "part1.safetensors: No such file");
}

TEST(BertPretrained, FoldersThatAreNoModelSayWhatToDo) {
  const BertFolderOnDisk folder(golden_weights());
  std::filesystem::resize_file(folder / "model.safetensors", 90'000);
  expect_contains(folder.error(), "truncated");
  std::filesystem::remove(folder / "model.safetensors");
  expect_contains(folder.error(), "model.safetensors: the file is missing");
  std::ofstream(folder / "pytorch_model.bin") << "pickle";
  expect_contains(folder.error(), "convert them once: python -c");
  std::ofstream(folder / "config.json") << R"({"model_type": "t5"})";
  expect_contains(folder.error(), "config.json: model_type=\"t5\"");
  std::ofstream(folder / "config.json") << "{";
  expect_contains(folder.error(), "config.json");
  std::filesystem::remove(folder / "config.json");
  expect_contains(folder.error(), "bert-tiny");
  EXPECT_THROW(AutoModelForSequenceClassification::from_pretrained("/nowhere/at/all"), InputError);
}

TEST(BertPretrained, ARepositoryInTheCacheIsTheFolderAndOneWithoutWeightsSaysHowToGetThem) {
  const TemporaryFolder home;
  const testing_support::ScopedEnvironment cache{{{"HF_HUB_CACHE", home.path()}}};
  const auto snapshot =
      testing_support::add_to_hub_cache(home.path(), "org/bert", kBertGoldenFolder, "c0ffee");
  expect_equal_weights(AutoModelForSequenceClassification::from_pretrained("org/bert@c0ffee"),
                       golden_weights());
  EXPECT_EQ(AutoConfig::from_pretrained("org/bert").to_json(),
            AutoConfig::from_pretrained(kBertGoldenFolder).to_json());
  const auto error = [] {
    return testing_support::error_of<InputError>(
        [] { AutoModelForSequenceClassification::from_pretrained("org/bert"); });
  };
  std::filesystem::remove(snapshot / "model.safetensors");
  expect_contains(error(), (snapshot / "model.safetensors: the file is missing").string());
  expect_contains(error(), "Fix: hf download org/bert.");
  std::filesystem::remove(snapshot / "config.json");
  expect_contains(error(), (snapshot / "config.json: the file is missing").string());
  expect_contains(error(), "Fix: hf download org/bert.");
}

TEST(BertPretrained, ShapesGiveRandomModelsOfTheCallersVocabulary) {
  set_seed(3);
  const auto loaded = AutoModelForSequenceClassification::from_pretrained(
      "bert-tiny", {.id2label = {{"x", "y", "z"}}, .vocab_size = 77});
  EXPECT_EQ(loaded->named_parameters()["bert.embeddings.word_embeddings.weight"].size(0), 77);
  EXPECT_EQ(loaded->named_parameters()["classifier.weight"].size(0), 3);
  EXPECT_TRUE(loaded->loading_info().new_output);
  expect_contains(loaded->loading_info().report.at(0), "random");
}

} // namespace hasten
