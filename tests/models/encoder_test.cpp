#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "golden_folder.h"
#include "hasten/base/error.h"
#include "hasten/core/block_call.h"
#include "hasten/core/random.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/auto_model.h"

namespace hasten {

using testing_support::kBertGoldenFolder;

static const NamedTensors& bert_golden() {
  static const NamedTensors golden =
      SafetensorsReader(std::string(kBertGoldenFolder) + "/golden.safetensors").read_all();
  return golden;
}

static PreTrainedModel golden_bert() {
  return AutoModelForSequenceClassification::from_pretrained(kBertGoldenFolder);
}

// A small BERT with dropout.
static PreTrainedConfig small_bert_config() {
  PreTrainedConfig config;
  config.vocab_size = 50;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 2;
  config.intermediate_size = 64;
  config.max_position_embeddings = 24;
  return config;
}

static double max_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

static std::string config_error(const nlohmann::json& json) {
  try {
    PreTrainedConfig::from_json(json);
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

TEST(Bert, LogitsOnAPaddedBatchEqualTransformers) {
  auto model = golden_bert();
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto& golden = bert_golden();
  const auto& ids = golden.at("input_ids");
  const auto& mask = golden.at("attention_mask");
  EXPECT_LE(max_difference(model->forward({ids, mask}).logits, golden.at("logits")), 1e-5);
  EXPECT_LE(max_difference(model->forward({ids, mask, golden.at("token_type_ids")}).logits,
                           golden.at("logits_with_types")),
            1e-5);
  EXPECT_GT(max_difference(golden.at("logits_with_types"), golden.at("logits")), 1e-2);
}

TEST(Bert, TenAdamWStepsHaveTheLossesOfTransformers) {
  auto model = golden_bert();
  model->train(); // the configuration has dropout 0
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  const auto& golden = bert_golden();
  for (int step = 0; step < 10; ++step) {
    const std::string name = "step" + std::to_string(step) + ".";
    const auto loss = model
                          ->forward({.input_ids = golden.at(name + "input_ids"),
                                     .attention_mask = golden.at(name + "attention_mask"),
                                     .labels = golden.at(name + "labels")})
                          .loss;
    EXPECT_NEAR(loss.item<double>(), golden.at("losses")[step].item<double>(), 1e-5) << step;
    optimizer.zero_grad();
    loss.backward();
    for (const auto& parameter : model->named_parameters()) {
      const auto expected = golden.find("gradient." + parameter.key());
      if (step == 0 && expected != golden.end()) {
        const double largest = expected->second.abs().max().item<double>();
        EXPECT_LE(max_difference(parameter.value().grad(), expected->second), 1e-5 * largest)
            << parameter.key();
      }
    }
    optimizer.step();
  }
}

TEST(Bert, PaddingFurtherChangesNoLogit) {
  auto model = golden_bert();
  const auto& golden = bert_golden();
  const auto ids = golden.at("input_ids").slice(0, 0, 2).slice(1, 0, 17);
  const auto mask = golden.at("attention_mask").slice(0, 0, 2).slice(1, 0, 17);
  const auto pad = [](const at::Tensor& x, int64_t value) {
    return torch::constant_pad_nd(x, {0, 13}, value);
  };
  for (const bool training : {false, true}) {
    model->train(training);
    const auto logits = model->forward({ids, mask}).logits;
    // The content of the padding does not matter.
    EXPECT_LE(max_difference(logits, model->forward({pad(ids, 7), pad(mask, 0)}).logits), 1e-6);
    // A sample alone, without mask, equals the sample in a batch. Its last block is a product with
    // one vector, which sums in another order.
    EXPECT_LE(max_difference(logits.slice(0, 1, 2),
                             model->forward({ids.slice(0, 1, 2).slice(1, 0, 3)}).logits),
              2e-6);
  }
}

TEST(Bert, ParameterNamesAndShapesAreThoseOfTheFile) {
  const auto model = AutoModelForSequenceClassification::from_config(
      AutoConfig::from_pretrained(kBertGoldenFolder));
  const SafetensorsReader file(std::string(kBertGoldenFolder) + "/model.safetensors");
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters.size(), file.names().size());
  for (const auto& parameter : parameters) {
    ASSERT_TRUE(file.contains(parameter.key())) << parameter.key();
    EXPECT_EQ(at::IntArrayRef(file.entry(parameter.key()).shape), parameter.value().sizes());
  }
  EXPECT_TRUE(model->named_buffers().is_empty());
}

TEST(Bert, FreshWeightsFollowSeedAndRange) {
  auto config = small_bert_config();
  config.hidden_size = 128;
  set_seed(5);
  auto a = AutoModelForSequenceClassification::from_config(config);
  set_seed(5);
  const auto b = AutoModelForSequenceClassification::from_config(config);
  for (const auto& parameter : a->named_parameters()) {
    const auto& name = parameter.key();
    const auto& value = parameter.value();
    EXPECT_TRUE(torch::equal(value, b->named_parameters()[name])) << name;
    EXPECT_TRUE(value.requires_grad());
    if (name.find("LayerNorm.weight") != std::string::npos) {
      EXPECT_TRUE(value.eq(1).all().item<bool>()) << name;
    } else if (value.dim() == 1) {
      EXPECT_TRUE(value.eq(0).all().item<bool>()) << name;
    } else {
      EXPECT_NEAR(value.std().item<double>(), 0.02, 0.003) << name;
    }
  }
  const auto words = a->named_parameters()["bert.embeddings.word_embeddings.weight"];
  EXPECT_TRUE(words[0].eq(0).all().item<bool>());
  a->forward({torch::tensor({{3, 0, 4}})}).logits.sum().backward();
  EXPECT_TRUE(words.grad()[0].eq(0).all().item<bool>()); // padding row
  EXPECT_GT(words.grad()[3].abs().max().item<double>(), 0);
}

TEST(Bert, DropoutDependsOnTheGeneratorAndOnTrainingMode) {
  auto model = AutoModelForSequenceClassification::from_config(small_bert_config());
  const auto ids = torch::randint(1, 50, {4, 10});
  const auto run = [&](uint64_t seed) {
    torch::manual_seed(seed);
    return model->forward({ids}).logits;
  };
  EXPECT_TRUE(torch::equal(run(1), run(1)));
  EXPECT_FALSE(torch::equal(run(1), run(2)));
  model->eval();
  EXPECT_TRUE(torch::equal(run(1), run(2)));
}

class CountingInterceptor : public BlockInterceptor {
 public:
  std::vector<at::Tensor> intercept(const BlockCall&, std::vector<at::Tensor> inputs,
                                    Forward forward) override {
    ++calls;
    return forward(std::move(inputs));
  }
  int calls = 0;
};

TEST(Bert, EveryBlockIsCalledOncePerForward) {
  auto model = golden_bert();
  std::vector<std::shared_ptr<CountingInterceptor>> counters;
  std::vector<BlockAttachment> attachments;
  const auto& golden = bert_golden();
  for (const auto& block : model->blocks()) {
    counters.push_back(std::make_shared<CountingInterceptor>());
    attachments.push_back(attach_block(block, BlockStage::checkpoint, counters.back()));
  }
  model->eval();
  for (const auto& mask : {golden.at("attention_mask"), at::Tensor()}) {
    model->forward({golden.at("input_ids"), mask});
  }
  ASSERT_EQ(counters.size(), 3u);
  for (const auto& counter : counters) {
    EXPECT_EQ(counter->calls, 2);
  }
}

TEST(Bert, LongRowsAreRefusedByNumber) {
  auto model = AutoModelForSequenceClassification::from_config(small_bert_config());
  EXPECT_THROW(model->forward({torch::ones({1, 25}, torch::kLong)}), InputError);
}

TEST(PreTrainedConfig, ShapesAreThoseOfTheirNames) {
  const auto count = [](const std::string& shape) {
    int64_t numbers = 0;
    const auto model =
        model_from_config(AutoConfig::from_shape(shape), ModelTask::sequence_classification, false);
    for (const auto& parameter : model->parameters()) {
      numbers += parameter.numel();
    }
    return numbers;
  };
  EXPECT_EQ(count("bert-tiny"), 4'385'920 + 2 * 129);
  EXPECT_EQ(count("bert-mini"), 11'170'560 + 2 * 257);
  EXPECT_EQ(count("bert-base"), 109'482'240 + 2 * 769);
  EXPECT_EQ(AutoConfig::from_shape("bert-small").num_attention_heads, 8);
  EXPECT_THROW(AutoConfig::from_shape("bert-huge"), InputError);
}

TEST(PreTrainedConfig, UnknownKeysComeBackAndKnownOnesAreWritten) {
  auto config = AutoConfig::from_pretrained(kBertGoldenFolder);
  EXPECT_EQ(config.id2label, (std::vector<std::string>{"bad", "fair", "good"}));
  EXPECT_EQ(config.problem_type, "single_label_classification");
  EXPECT_FALSE(config.classifier_dropout);
  EXPECT_EQ(config.architectures, std::vector<std::string>{"BertForSequenceClassification"});
  config.id2label = {"no", "yes"};
  const auto json = config.to_json();
  EXPECT_EQ(json["a_key_of_somebody_else"], nlohmann::json({{"kept", {1, 2}}}));
  EXPECT_EQ(json["label2id"], nlohmann::json({{"no", 0}, {"yes", 1}}));
  EXPECT_EQ(json["dtype"], "float32");
  EXPECT_EQ(PreTrainedConfig::from_json(json).to_json(), json);
}

TEST(PreTrainedConfig, WhatNoModelCanHaveIsNamed) {
  const nlohmann::json good = PreTrainedConfig().to_json();
  EXPECT_EQ(config_error(good), "");
  const auto with = [&](const char* key, const nlohmann::json& value) {
    auto json = good;
    json[key] = value;
    return config_error(json);
  };
  const std::pair<std::string, std::string> cases[] = {
      {with("model_type", "t5"), "model_type=\"t5\""},
      {config_error(nlohmann::json::object()), "no model_type"},
      {config_error(3), "not a JSON object"},
      {with("hidden_act", "mish"), "hidden_act=\"mish\""},
      {with("num_attention_heads", 7), "hidden_size=768"},
      {with("num_hidden_layers", 0), "num_hidden_layers=0"},
      {with("num_hidden_layers", 1.5), "num_hidden_layers=1.5"},
      {with("vocab_size", "many"), "vocab_size=\"many\""},
      {with("hidden_size", int64_t{1} << 60), "hidden_size="},
      {with("hidden_dropout_prob", 1.0), "hidden_dropout_prob="},
      {with("pad_token_id", -1), "pad_token_id=-1"},
      {with("is_decoder", true), "is_decoder"},
      {with("position_embedding_type", "relative_key"), "relative_key"},
      {with("id2label", {{"0", "a"}, {"2", "b"}}), "id2label="},
      {with("id2label", {"a", "b"}), "id2label="},
      {with("layer_norm_eps", 0), "layer_norm_eps="},
  };
  for (const auto& [message, part] : cases) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
  }
}

} // namespace hasten
