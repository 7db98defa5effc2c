// Adapters give PEFT's numbers (tools/golden/lora.py), in any module and any mode.
#include "hasten/models/lora.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "foreign_model.h"
#include "golden_family.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/core/autocast.h"
#include "hasten/core/random.h"
#include "small_family.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::lora_test {

using namespace testing_support;

static const SafetensorsReader& golden_lora() {
  static const SafetensorsReader reader(kLoraGoldenFile);
  return reader;
}

static void write_config(const std::filesystem::path& folder, const nlohmann::json& json) {
  write_file_atomically(folder / "adapter_config.json", json.dump());
}

class Lora : public testing::Test {
 protected:
  OneThread one_thread_{};
  TemporaryFolder folder_{};
};

TEST_F(Lora, LogitsAndLossesEqualPeft) {
  for (const auto& [name, text] : golden_lora().metadata()) {
    if (name == "made_with") {
      continue;
    }
    SCOPED_TRACE(name);
    const auto json = nlohmann::json::parse(text);
    const PreTrainedConfig config = PreTrainedConfig::from_json(json.at("config"), name);
    PreTrainedModel model = model_from_config(config, golden_task(config));
    write_config(folder_.path(), json.at("adapter"));
    get_peft_model(model.ptr(), LoraConfig::from_pretrained(folder_.path()));
    fill_golden(*model);
    if (name.starts_with("tied_")) {
      const torch::NoGradGuard no_grad;
      auto parameters = model->named_parameters();
      ASSERT_NE(parameters.find("lm_head.weight"), nullptr) << "PEFT changes one of the two alone";
      parameters["lm_head.weight"].copy_(parameters["model.embed_tokens.weight"]);
    }
    const auto [trainable, all] = get_nb_trainable_parameters(*model);
    const at::Tensor counts = golden_lora().read(name + ".trainable");
    EXPECT_EQ(trainable, counts[0].item<int64_t>());
    model->eval();
    {
      const torch::NoGradGuard no_grad;
      ModelInputs inputs = golden_batch(0, model);
      inputs.labels = at::Tensor();
      at::Tensor logits = model->forward(inputs).logits;
      at::Tensor expected = golden_lora().read(name + ".logits");
      if (logits.dim() == 3) {
        logits = logits.index({inputs.attention_mask.to(at::kBool)});
        expected = expected.index({inputs.attention_mask.to(at::kBool)});
      }
      // Products of another CPU have other roundings: of the largest logit.
      EXPECT_LE((logits - expected).abs().max().item<double>(),
                1e-5 * std::max(1.0, expected.abs().max().item<double>()))
          << expected.abs().max();
    }
    model->train();
    std::vector<at::Tensor> trained;
    for (const auto& parameter : model->parameters()) {
      if (parameter.requires_grad()) {
        trained.push_back(parameter);
      }
    }
    torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
    const at::Tensor losses = golden_lora().read(name + ".losses");
    if (model->task() == ModelTask::causal_lm) { // another way to the same loss
      const auto first = model->causal_loss(golden_batch(1, model));
      const at::Tensor counted = shifted_labels(golden_batch(1, model).labels).ne(-100).sum();
      EXPECT_NEAR((first.loss_sum / counted).item<double>(), losses[0].item<double>(), 1e-5);
    }
    for (int64_t step = 0; step < losses.size(0); ++step) {
      const at::Tensor loss = model->forward(golden_batch(step + 1, model)).loss;
      EXPECT_NEAR(loss.item<double>(), losses[step].item<double>(), 1e-5) << step;
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
  }
}

TEST_F(Lora, WithoutNamesItAdaptsTheFamilysModules) {
  const std::pair<const char*, std::vector<std::string>> peft[] = {
      {"bert", {"query", "value"}},
      {"gpt2", {"c_attn"}},
      {"qwen3", {"q_proj", "v_proj"}},
      {"mistral", {"q_proj", "v_proj"}}};
  for (const auto& [type, targets] : peft) {
    PreTrainedModel model = model_from_config(small_config(type), model_family(type).tasks.front());
    EXPECT_EQ(get_peft_model(model.ptr(), {.r = 2}).target_modules, targets) << type;
  }
}

TEST_F(Lora, AForeignModuleIsAdaptedInEveryMode) {
  auto model = foreign_model();
  auto base = foreign_model(); // the same weights
  get_peft_model(model.ptr(), {.r = 2, .lora_alpha = 6, .target_modules = {"2", "4"}});
  fill_adapter(*model);
  const at::Tensor x = torch::randn({5, 12});
  const auto expected = [&] {
    const auto p = model->named_parameters();
    const auto layer = [&](const std::string& name, const at::Tensor& in) {
      const at::Tensor out = at::linear(in, base->named_parameters()[name + ".weight"],
                                        base->named_parameters()[name + ".bias"]);
      return name == "0" ? out
                         : out + 3 * in.matmul(p[name + ".lora_A.weight"].t())
                                         .matmul(p[name + ".lora_B.weight"].t());
    };
    return layer("4", layer("2", layer("0", x).relu()).relu());
  }();
  const auto close = [](const at::Tensor& a, const at::Tensor& b, double tolerance) {
    EXPECT_LE((a.to(at::kFloat) - b).abs().max().item<double>(), tolerance);
  };
  close(model->forward(x), expected, 1e-5);
  close(model->forward(x.view({1, 5, 12})), expected, 1e-5); // by another operator
  {
    const at::NoGradGuard no_grad;
    close(model->forward(x), expected, 1e-5);
  }
  {
    const c10::InferenceMode inference;
    close(model->forward(torch::clone(x)), expected, 1e-5);
    close(model->forward(torch::clone(x.view({1, 5, 12}))), expected, 1e-5);
  }
  const at::Tensor narrow = [&] {
    const Autocast autocast;
    return model->forward(x);
  }();
  EXPECT_EQ(narrow.scalar_type(), at::kBFloat16);
  close(narrow, expected, 0.02);
  EXPECT_GT((expected - base->forward(x)).abs().max().item<double>(), 0.15);
  const auto p = model->named_parameters();
  const at::Tensor plain = base->named_parameters()["2.weight"];
  const at::Tensor row = torch::randn({5, plain.size(1)});
  close(at::addmm(p["2.bias"], row, p["2.weight"].t(), 1, 0.5),
        p["2.bias"] + 0.5 * row.matmul(plain.t()) +
            1.5 * row.matmul(p["2.lora_A.weight"].t()).matmul(p["2.lora_B.weight"].t()),
        1e-5);

  narrow.sum().backward();
  for (const auto& parameter : model->named_parameters()) {
    const bool adapter = parameter.key().find("lora_") != std::string::npos;
    EXPECT_EQ(parameter.value().requires_grad(), adapter) << parameter.key();
    EXPECT_EQ(parameter.value().grad().defined(), adapter) << parameter.key();
  }
}

TEST_F(Lora, AnEmbeddingIsAdaptedInEveryMode) {
  torch::manual_seed(4);
  torch::nn::Sequential model(
      torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 6).padding_idx(0))); // a row of 0
  const at::Tensor words = model->named_parameters()["0.weight"].clone();
  get_peft_model(model.ptr(), {.r = 2, .lora_alpha = 6, .target_modules = {"0"}, .use_dora = true});
  const at::Tensor ids = torch::tensor({{1, 0, 3}, {9, 1, 1}});
  EXPECT_LE((model->forward(ids) - at::embedding(words, ids)).abs().max().item<double>(), 1e-6);
  fill_adapter(*model);
  const auto p = model->named_parameters();
  const at::Tensor whole =
      words + 3 * p["0.lora_embedding_B.weight"].matmul(p["0.lora_embedding_A.weight"]).t();
  const at::Tensor expected =
      at::embedding(whole * p["0.lora_magnitude_vector.weight"] / whole.norm(2, 0), ids);
  const auto close = [&](const at::Tensor& result, double tolerance) {
    EXPECT_LE((result - expected).abs().max().item<double>(), tolerance);
  };
  const at::Tensor result = model->forward(ids);
  close(result, 1e-5);
  {
    const c10::InferenceMode inference;
    close(model->forward(torch::clone(ids)), 1e-5);
  }
  {
    const Autocast autocast;
    close(model->forward(ids), 0.1);
  }
  result.sum().backward();
  EXPECT_FALSE(p["0.weight"].grad().defined());
  const at::Tensor of_a = p["0.lora_embedding_A.weight"].grad();
  EXPECT_EQ(of_a.select(1, 0).abs().sum().item<double>(), 0) << "padding";
  EXPECT_GT(of_a.select(1, 9).abs().sum().item<double>(), 0);
  EXPECT_TRUE(p["0.lora_magnitude_vector.weight"].grad().defined());
}

TEST_F(Lora, LayersThatShareAWeightHaveAnAdapterEach) {
  torch::nn::Embedding words(10, 6);
  torch::nn::Linear head(6, 10);
  head->weight = words->weight; // as models of others tie them
  torch::nn::Sequential model(words, head);
  const at::Tensor ids = torch::arange(10);
  const auto results = [&] { return std::pair(words->forward(ids), head->forward(torch::eye(6))); };
  const auto base = results();
  get_peft_model(model.ptr(), {.r = 2, .target_modules = {"0", "1"}});
  const at::NoGradGuard no_grad;
  words->named_parameters()["lora_embedding_A.weight"].fill_(0.1);
  EXPECT_FALSE(at::equal(results().first, base.first));
  EXPECT_TRUE(at::equal(results().second, base.second));
  head->named_parameters()["lora_B.weight"].fill_(0.1);
  EXPECT_FALSE(at::equal(results().second, base.second));
}

// With dropout PEFT's DoRA reads W x again, from what is left of x.
TEST_F(Lora, DropoutIsBeforeBothProductsOfDora) {
  torch::nn::Sequential model(torch::nn::Linear(20, 20));
  {
    const at::NoGradGuard no_grad;
    torch::nn::init::eye_(model->named_parameters()["0.weight"]);
  }
  get_peft_model(model.ptr(), {.lora_dropout = 0.5, .target_modules = {"0"}, .use_dora = true});
  const at::NoGradGuard no_grad;
  auto p = model->named_parameters();
  p["0.lora_magnitude_vector.weight"].fill_(4);
  const at::Tensor x = torch::ones({3, 20});
  const at::Tensor added = model->forward(x) - x - p["0.bias"]; // 3 dropout(x)
  EXPECT_LE((added * (added - 6)).abs().max().item<double>(), 1e-4) << added;
  EXPECT_GT(added.max().item<double>() - added.min().item<double>(), 5);
  model->eval();
  EXPECT_TRUE(at::allclose(model->forward(x), 4 * x + p["0.bias"]));
}

TEST_F(Lora, ANewAdapterChangesNothingAndDropoutOnlyTraining) {
  PreTrainedModel model = model_from_config(small_config("llama"), ModelTask::causal_lm);
  const ModelInputs inputs = small_inputs(2, 6);
  const at::Tensor before = model->logits(inputs);
  get_peft_model(model.ptr(), {.lora_dropout = 0.5});
  EXPECT_TRUE(at::equal(model->logits(inputs), before));
  fill_adapter(*model);
  EXPECT_FALSE(at::equal(model->logits(inputs), model->logits(inputs)));
  model->eval();
  EXPECT_TRUE(at::equal(model->logits(inputs), model->logits(inputs)));
}

TEST_F(Lora, MergedEqualsUnmerged) {
  // In fp32 but for the roundings of three blocks.
  const LoraConfig all{.target_modules = {"all-linear"}};
  LoraConfig dora{.target_modules = {"q_proj", "lm_head", "embed_tokens"}, .use_dora = true};
  LoraConfig gpt2_dora{.target_modules = {"c_attn", "wte"}, .use_dora = true}; // tied
  for (const auto& [type, config, dtype, limit] : {std::tuple{"llama", all, at::kDouble, 1e-12},
                                                   {"gpt2", all, at::kDouble, 1e-12},
                                                   {"llama", all, at::kFloat, 4e-6},
                                                   {"gpt2", all, at::kFloat, 4e-6},
                                                   {"llama", dora, at::kDouble, 1e-12},
                                                   {"gpt2", gpt2_dora, at::kDouble, 1e-12}}) {
    SCOPED_TRACE(c10::str(type, " ", dtype, " ", joined(config.target_modules)));
    torch::manual_seed(8);
    PreTrainedModel model = model_from_config(small_config(type), ModelTask::causal_lm);
    const size_t base_count = model->named_parameters().size();
    const bool unties = std::string(type) == "gpt2" && config.use_dora;
    get_peft_model(model.ptr(), config);
    fill_adapter(*model);
    model->to(dtype);
    model->eval();
    const ModelInputs inputs = small_inputs(2, 6);
    const at::Tensor before = model->logits(inputs);
    const auto distance = [&] {
      return ((model->logits(inputs) - before).abs().max() / before.abs().max()).item<double>();
    };
    merge_adapter(*model);
    merge_adapter(*model); // nothing more
    EXPECT_LE(distance(), limit);
    EXPECT_NE(error_of([&] { save_adapter(*model, {}, folder_.path()); }).find("merged"),
              std::string::npos);
    unmerge_adapter(*model);
    EXPECT_LE(distance(), limit);
    merge_and_unload(*model);
    EXPECT_LE(distance(), limit);
    EXPECT_EQ(model->named_parameters().size(), base_count + unties);
  }
}

TEST_F(Lora, CheckpointingGivesTheSameGradients) {
  const auto gradients = [](bool checkpointing) {
    set_seed(5);
    PreTrainedModel model = model_from_config(small_config("llama", 0.1), ModelTask::causal_lm);
    get_peft_model(model.ptr(), {.lora_dropout = 0.3, .target_modules = {"all-linear"}});
    fill_adapter(*model);
    if (checkpointing) {
      model->gradient_checkpointing_enable();
    }
    ModelInputs inputs = small_inputs(2, 8);
    inputs.labels = inputs.input_ids;
    model->forward(inputs).loss.backward();
    std::vector<at::Tensor> made;
    for (const auto& parameter : model->parameters()) {
      if (parameter.requires_grad()) {
        made.push_back(parameter.grad());
      }
    }
    return made;
  };
  const auto plain = gradients(false), recomputed = gradients(true);
  ASSERT_EQ(plain.size(), 3 * 7 * 2);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(at::equal(plain[i], recomputed[i])) << i;
  }
}

TEST_F(Lora, FrozenWeightsInBf16GiveTheSameBits) {
  PreTrainedModel model = model_from_config(small_config("llama"), ModelTask::causal_lm);
  get_peft_model(model.ptr(), {});
  fill_adapter(*model);
  ModelInputs inputs = small_inputs(2, 8);
  inputs.labels = inputs.input_ids;
  const auto run = [&] {
    model->zero_grad();
    at::Tensor loss;
    {
      const Autocast autocast;
      loss = model->forward(inputs).loss;
    }
    loss.backward();
    std::vector<at::Tensor> values{loss.detach()};
    for (const auto& parameter : model->parameters()) {
      if (parameter.requires_grad()) {
        EXPECT_EQ(parameter.scalar_type(), at::kFloat);
        values.push_back(parameter.grad().clone());
      }
    }
    return values;
  };
  const auto wide = run();
  cast_frozen_weights(*model, at::kBFloat16);
  EXPECT_EQ(model->named_parameters()["model.layers.0.self_attn.q_proj.weight"].scalar_type(),
            at::kBFloat16);
  const auto narrow = run();
  for (size_t i = 0; i < wide.size(); ++i) {
    EXPECT_TRUE(at::equal(wide[i], narrow[i])) << i;
  }
}

TEST_F(Lora, AWeightThatWasFreedLeavesNoAdapterBehind) {
  for (int round = 0; round < 20; ++round) {
    auto adapted = foreign_model();
    get_peft_model(adapted.ptr(), {.target_modules = {"all-linear"}});
    fill_adapter(*adapted);
    adapted = nullptr;
    auto plain = foreign_model();
    const at::Tensor x = torch::randn({2, 12});
    const auto p = plain->named_parameters();
    const at::Tensor first = x.matmul(p["0.weight"].t()) + p["0.bias"];
    EXPECT_TRUE(at::allclose(plain->ptr(0)->as<torch::nn::Linear>()->forward(x), first, 0, 1e-5));
  }
}

TEST_F(Lora, BadConfigurationsAreErrorsThatNameTheValue) {
  const auto bert = [&](const LoraConfig& config) {
    return error_of([&] {
      get_peft_model(
          model_from_config(small_config("bert"), ModelTask::sequence_classification).ptr(),
          config);
    });
  };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(bert({.r = 0}), "r=0. Expected at least 1");
  has(bert({.lora_alpha = 0}), "lora_alpha=0");
  has(bert({.lora_dropout = 1}), "lora_dropout=1");
  const std::string nothing = bert({.target_modules = {"query", "q_proj"}});
  has(nothing, "\"q_proj\" matches nothing");
  has(nothing, "query"); // one that exists
  has(bert({.target_modules = {"LayerNorm"}}), "\"LayerNorm\" is no linear layer");
  has(bert({.target_modules = {"classifier"}}), "modules_to_save");
  has(bert({.modules_to_save = {"head"}}), "\"head\" matches nothing");
  has(error_of([&] { get_peft_model(foreign_model().ptr(), {}); }), "target_modules is empty");
  auto twice = foreign_model();
  get_peft_model(twice.ptr(), {.target_modules = {"2"}});
  has(error_of([&] { get_peft_model(twice.ptr(), {.target_modules = {"2"}}); }),
      "the model has an adapter");
  has(error_of([&] { merge_adapter(*foreign_model()); }), "the model has no adapter");
}

} // namespace hasten::lora_test
