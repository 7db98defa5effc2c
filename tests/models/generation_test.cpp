#include "hasten/models/generation.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "few_rows.h"
#include "golden_family.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/models/key_value_cache.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::generation_test {

using namespace testing_support;
using Tokens = std::vector<std::vector<int64_t>>;

class Generation : public testing::Test {
  OneThread one_thread_{};
};

nlohmann::json golden() { return read_json_file("test", kGenerationGoldenFile); }

Tokens generate_one_by_one(PreTrainedModel model, const Tokens& prompts,
                           const GenerationConfig& config) {
  Tokens answers;
  for (const auto& prompt : prompts) {
    answers.push_back(generate(model, {prompt}, config)[0]);
  }
  return answers;
}

TEST_F(Generation, AnswersAreThoseOfTransformersWithAndWithoutCacheAndInABatch) {
  const nlohmann::json answers = golden().at("answers");
  ASSERT_GE(answers.size(), 5U);
  for (const auto& [name, expected] : answers.items()) {
    SCOPED_TRACE(name);
    PreTrainedModel model = golden_model(name);
    const Tokens prompts = expected.at("prompts");
    GenerationConfig config{.max_new_tokens = 14, .eos_token_id = {2}};
    for (const bool cache : {true, false}) {
      if (!cache && name == "llama_dynamic") {
        continue; // a cache keeps keys with the angles of a shorter text
      }
      config.use_cache = cache;
      config.repetition_penalty = 1;
      EXPECT_EQ(generate(model, prompts, config), expected.at("greedy").get<Tokens>());
      EXPECT_EQ(generate_one_by_one(model, prompts, config), expected.at("greedy").get<Tokens>());
      config.repetition_penalty = 1.3;
      EXPECT_EQ(generate(model, prompts, config), expected.at("repetition_penalty").get<Tokens>());
    }
    EXPECT_TRUE(model->is_training());
  }
}

TEST_F(Generation, SamplersLeaveTheProbabilitiesOfTransformers) {
  const nlohmann::json expected = golden();
  const auto rows = expected.at("scores").get<std::vector<std::vector<float>>>();
  const at::Tensor scores = at::stack({at::tensor(rows[0]), at::tensor(rows[1])});
  for (const auto& sampler : expected.at("samplers")) {
    SCOPED_TRACE(sampler.dump());
    const TokenCandidates found = token_candidates(scores, {.temperature = sampler["temperature"],
                                                            .top_k = sampler["top_k"],
                                                            .top_p = sampler["top_p"]});
    const at::Tensor all = at::zeros_like(scores).scatter_(1, found.tokens, found.probabilities);
    for (size_t row = 0; row < 2; ++row) {
      const auto wanted = sampler["probabilities"][row].get<std::vector<float>>();
      EXPECT_TRUE(at::allclose(all[static_cast<int64_t>(row)], at::tensor(wanted), 1e-5, 1e-6));
    }
  }
}

TEST_F(Generation, DrawsFollowTheProbabilitiesAndTheSeedAndNotTheBatch) {
  PreTrainedModel model = golden_model("llama");
  const std::vector<int64_t> prompt{9, 30, 12};
  GenerationConfig config{.max_new_tokens = 1, .do_sample = true, .temperature = 3, .top_k = 4};
  const Tokens many(4000, prompt);
  at::Tensor counts = at::zeros({kGoldenVocab});
  for (const auto& answer : generate(model, many, config)) {
    counts[answer.at(0)] += 1;
  }
  model->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor logits =
      model->forward({.input_ids = at::tensor(prompt).view({1, 3}), .logits_to_keep = 1}).logits;
  EXPECT_EQ(logits.size(1), 1);
  const TokenCandidates candidates = token_candidates(logits[0], config);
  const at::Tensor expected =
      at::zeros({kGoldenVocab}).scatter_(0, candidates.tokens[0], candidates.probabilities[0]);
  // Five standard deviations of a count of 4,000 draws, at most.
  EXPECT_LT((counts / 4000 - expected).abs().max().item<double>(), 0.04);
  EXPECT_GT(counts.gt(0).sum().item<int64_t>(), 2);

  config.max_new_tokens = 12;
  const Tokens prompts{{9, 30, 12}, {11}, {20, 21}};
  const Tokens together = generate(model, prompts, config);
  EXPECT_EQ(generate(model, prompts, config), together);
  EXPECT_EQ(generate(model, {prompts[0]}, config)[0], together[0]);
  config.seed = 7;
  EXPECT_NE(generate(model, prompts, config), together);
}

TEST_F(Generation, AnswersEndWhereTheyShould) {
  PreTrainedModel model = golden_model("gpt2");
  const Tokens prompts{{45, 16, 19, 29, 36}, {11}, {27, 44, 44}};
  const Tokens whole = generate(model, prompts);
  EXPECT_EQ(whole[1].size(), 15U); // 20 positions, the longest prompt has 5
  const GenerationConfig config{.eos_token_id = {24, 39}};
  const Tokens cut = generate(model, prompts, config);
  EXPECT_EQ(cut[0], (std::vector<int64_t>{3, 24}));
  EXPECT_EQ(cut[1], (std::vector<int64_t>{3, 0, 0, 0, 39}));
  EXPECT_EQ(cut[2], whole[2]);
  const Tokens asked = generate(model, prompts, {}, [](size_t prompt, const auto& tokens) {
    return tokens.size() == prompt + 1;
  });
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(asked[i], std::vector(whole[i].begin(), whole[i].begin() + static_cast<int>(i) + 1));
  }
  for (const auto& answer : generate(model, prompts, {.vocab_size = 30})) {
    EXPECT_LT(*std::ranges::max_element(answer), 30);
  }
}

TEST_F(Generation, TheCacheTakesATextInPieces) {
  const at::NoGradGuard no_grad;
  PreTrainedModel model = nullptr;
  at::Tensor ids;
  std::shared_ptr<KeyValueCache> cache;
  for (const char* name : {"mistral", "smollm3_windows", "qwen3"}) {
    model = golden_model(name);
    model->eval();
    ids = golden_batch(1, model).input_ids;
    const at::Tensor whole = model->forward({.input_ids = ids}).logits;
    cache = std::make_shared<KeyValueCache>();
    std::vector<at::Tensor> parts;
    for (const at::Tensor& part : ids.split_with_sizes({5, 1, 6}, 1)) {
      parts.push_back(model->forward({.input_ids = part, .past_key_values = cache}).logits);
    }
    EXPECT_EQ(cache->length(), 12);
    EXPECT_LE((at::cat(parts, 1) - whole).abs().max().item<double>(), 1e-5) << name;
  }
  EXPECT_NE(
      error_of([&] {
        model->forward({.input_ids = ids.slice(0, 0, 2).slice(1, 0, 1), .past_key_values = cache});
      }).find("a cache for each batch"),
      std::string::npos);
  EXPECT_NE(error_of([&] {
              model->forward({.input_ids = ids, .past_key_values = cache});
            }).find("max_tokens"),
            std::string::npos);
}

TEST_F(Generation, TheProductOfFewRowsEqualsTorchs) {
  torch::manual_seed(1);
  for (const int64_t rows : {1, 2, 3, 4, 5, 16}) {
    for (const auto& [out, in] : {std::pair<int64_t, int64_t>{7, 5}, {65, 48}, {1030, 33}}) {
      const at::Tensor weight = at::randn({out, in}), bias = at::randn({out});
      const c10::InferenceMode inference;
      const at::Tensor x = at::randn({rows, in});
      for (const at::Tensor& w : {weight, weight.t().contiguous().t()}) {
        ASSERT_TRUE(detail::takes_few_rows(x, w));
        const at::Tensor expected = at::linear(x.to(at::kDouble), w.to(at::kDouble));
        const at::Tensor found = detail::few_rows_linear(x, w, {});
        EXPECT_LE((found - expected).abs().max().item<double>(), 2e-5);
        EXPECT_TRUE(at::equal(detail::few_rows_linear(x, w, bias), found + bias));
      }
    }
  }
  EXPECT_FALSE(detail::takes_few_rows(at::randn({2, 5}), at::randn({7, 5}))); // with gradients
}

TEST_F(Generation, BadInputIsNamed) {
  PreTrainedModel model = golden_model("gpt2");
  const auto error = [&](const Tokens& prompts, const GenerationConfig& config = {}) {
    return error_of([&] { generate(model, prompts, config); });
  };
  EXPECT_NE(error({{8}, {}}).find("prompt 1: it has no tokens"), std::string::npos);
  EXPECT_NE(error({{48}}).find("id=48"), std::string::npos);
  EXPECT_NE(error({std::vector<int64_t>(20, 9)}).find("20 positions"), std::string::npos);
  EXPECT_NE(error({{9}}, {.max_new_tokens = 20}).find("max_new_tokens=20"), std::string::npos);
  const auto drawn_error = [&](GenerationConfig config) {
    config.do_sample = true;
    return error({{9}}, config);
  };
  EXPECT_NE(drawn_error({.temperature = 0}).find("temperature=0"), std::string::npos);
  EXPECT_NE(drawn_error({.top_p = 1.5}).find("top_p=1.5"), std::string::npos);
  EXPECT_NE(error({{9}}, {.stop_strings = {"end"}}).find("stop_strings=end"), std::string::npos);
  EXPECT_NE(error({{9, 9, 9}}, {.max_length = 3}).find("tokens=3, max_length=3"),
            std::string::npos);
  PreTrainedModel classifier = golden_model("llama_classes");
  EXPECT_NE(error_of([&] { generate(classifier, {{9}}); }).find("SequenceClassification"),
            std::string::npos);
}

TEST_F(Generation, OptionsComeFromTheFolder) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(GenerationConfig::from_pretrained(folder / "").eos_token_id, std::vector<int64_t>{7});
  const auto with = [&](const char* text) {
    write_file_atomically(folder / "generation_config.json", text);
    return GenerationConfig::from_pretrained(folder / "");
  };
  const auto config =
      with(R"({"do_sample": true, "top_p": 0.9, "eos_token_id": [5, 6], "num_beams": 1})");
  EXPECT_TRUE(config.do_sample);
  EXPECT_EQ(config.top_p, 0.9);
  EXPECT_EQ(config.eos_token_id, (std::vector<int64_t>{5, 6}));
  EXPECT_NE(error_of([&] { with(R"({"num_beams": 4})"); }).find("num_beams=4"), std::string::npos);
  EXPECT_NE(error_of([&] { with(R"({"top_k": "x"})"); }).find("top_k"), std::string::npos);
  EXPECT_NE(error_of([&] { with(R"({"do_sample": true, "min_p": 0.1})"); }).find("min_p=0.1"),
            std::string::npos);
  EXPECT_EQ(with(R"({"min_p": 0.1, "top_k": 1})").top_k, 1) << "min_p counts with do_sample only";
  // config.json counts only without the other file.
  EXPECT_TRUE(with(R"({"top_k": 1})").eos_token_id.empty());
}

TEST_F(Generation, GreedyFoldersWithoutATemperatureGenerate) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "generation_config.json",
                        R"({"do_sample": false, "temperature": 0.0, "top_p": 0.0, "top_k": -1})");
  PreTrainedModel model = golden_model("gpt2");
  auto config = GenerationConfig::from_pretrained(folder / "");
  config.max_new_tokens = 4;
  EXPECT_EQ(generate(model, {{8, 9}}, config), generate(model, {{8, 9}}, {.max_new_tokens = 4}));
  config.do_sample = true;
  config.temperature = 1; // what a flag sets replaces the file's value before it is checked
  config.top_p = 1;
  config.top_k = 0;
  EXPECT_EQ(generate(model, {{8, 9}}, config)[0].size(), 4u);
}

TEST_F(Generation, MaxLengthCountsThePrompt) {
  const TemporaryFolder folder;
  const auto length = [&](const char* text, const std::vector<int64_t>& prompt) {
    write_file_atomically(folder / "generation_config.json", text);
    return generate(golden_model("gpt2"), {prompt},
                    GenerationConfig::from_pretrained(folder / ""))[0]
        .size();
  };
  EXPECT_EQ(length(R"({"max_length": 9})", {8, 9}), 7u);
  EXPECT_EQ(length(R"({"max_length": 9})", {8, 9, 10, 11}), 5u);
  EXPECT_EQ(length(R"({"max_length": 9, "max_new_tokens": 3})", {8, 9}), 3u);
  EXPECT_EQ(length(R"({"max_length": 20})", {8, 9}), 18u) << "20 counts as no limit";
}

TEST_F(Generation, TopKKeepsAllTokensThatAreAsProbableAsTheLastOne) {
  const at::Tensor logits =
      at::tensor({1.f, 3.f, 2.f, 2.f, 0.f, 5.f, 4.f, 3.f, 2.f, 1.f}).view({2, 5});
  const auto [tokens, probabilities] = token_candidates(logits, {.do_sample = true, .top_k = 2});
  ASSERT_EQ(tokens.sizes(), (at::IntArrayRef{2, 3}));
  EXPECT_EQ(tokens[0][0].item<int64_t>(), 1);
  // As transformers' TopKLogitsWarper: softmax over 3, 2, 2, and over 5, 4.
  const at::Tensor first = at::tensor({3.f, 2.f, 2.f}).softmax(0);
  EXPECT_TRUE(at::allclose(probabilities[0], first)) << probabilities;
  EXPECT_EQ(probabilities[1][2].item<float>(), 0);
}

} // namespace hasten::generation_test
