#include "hasten/text/data_collator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "hasten/base/error.h"
#include "hasten/data/loader.h"
#include "hasten/text/tokenized_dataset.h"
#include "support/error_of.h"

namespace hasten {

using testing_support::error_of;

namespace {

constexpr int64_t kPieces = 105;

WordPieceTokenizer masking_tokenizer() {
  std::vector<std::string> pieces{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
  for (int64_t i = std::ssize(pieces); i < kPieces; ++i) {
    pieces.push_back("p" + std::to_string(i));
  }
  return WordPieceTokenizer(pieces);
}

/// [CLS], `words` words of two tokens, [SEP].
TokenFeature sample(int64_t index, int64_t words) {
  TokenFeature feature{.input_ids = {2}, .word_ids = {-1}, .index = index};
  for (int64_t word = 0; word < words; ++word) {
    feature.input_ids.insert(feature.input_ids.end(), 2, 5 + (index + word) % 100);
    feature.word_ids.insert(feature.word_ids.end(), 2, word);
  }
  feature.input_ids.push_back(3);
  feature.word_ids.push_back(-1);
  return feature;
}

std::vector<TokenFeature> samples(int64_t count, int64_t words) {
  std::vector<TokenFeature> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back(sample(i, words + i % 3));
  }
  return all;
}

} // namespace

TEST(DataCollator, LabelsOfTokensArePaddedAtTheSideOfTheTokens) {
  const std::vector<TokenFeature> features{
      {.input_ids = {7, 8}, .labels = std::vector<int64_t>{1, -100}, .index = 4},
      {.input_ids = {9}, .token_type_ids = {1}, .labels = std::vector<int64_t>{0}, .index = 2}};
  const Batch batch = DataCollatorForTokenClassification(
      {.pad_id = 6, .pad_to_multiple_of = 3, .padding_side = TokenSide::left})(features, 0);
  EXPECT_TRUE(batch["input_ids"].equal(at::tensor({6, 7, 8, 6, 6, 9}, at::kLong).view({2, 3})));
  EXPECT_TRUE(
      batch["labels"].equal(at::tensor({-100, 1, -100, -100, -100, 0}, at::kLong).view({2, 3})));
  EXPECT_TRUE(
      batch["token_type_ids"].equal(at::tensor({0, 0, 0, 0, 0, 1}, at::kLong).view({2, 3})));
  EXPECT_TRUE(
      batch["attention_mask"].equal(at::tensor({0, 1, 1, 0, 0, 1}, at::kLong).view({2, 3})));
  EXPECT_EQ(batch.indices, (std::vector<int64_t>{4, 2}));
}

TEST(DataCollator, LabelsOfAnotherKindOrLengthAreErrors) {
  const DataCollatorWithPadding collator({.pad_id = 0});
  EXPECT_NE(error_of([&] {
              collator({{.input_ids = {1}, .labels = int64_t{1}},
                        {.input_ids = {1}, .labels = 1.0f, .index = 8}},
                       0);
            }).find("sample=8"),
            std::string::npos);
  EXPECT_THROW(DataCollatorForTokenClassification({.pad_id = 0})(
                   {{.input_ids = {1, 2}, .labels = std::vector<int64_t>{1}}}, 0),
               InputError);
  EXPECT_THROW(DataCollatorWithPadding({.pad_id = -1}), InputError);
}

TEST(Masking, TokensAreChosenAndReplacedWithTheirProbabilities) {
  const DataCollatorForLanguageModeling collator(masking_tokenizer());
  const std::vector<TokenFeature> features = samples(600, 30);
  const Batch batch = collator(features, 0);
  const at::Tensor& ids = batch["input_ids"];
  const at::Tensor& labels = batch["labels"];
  double tokens = 0, chosen = 0, masked = 0, kept = 0;
  for (int64_t row = 0; row < ids.size(0); ++row) {
    const auto& original = features[static_cast<size_t>(row)].input_ids;
    for (int64_t i = 0; i < std::ssize(original); ++i) {
      const auto now = ids[row][i].item<int64_t>(), label = labels[row][i].item<int64_t>();
      const int64_t before = original[static_cast<size_t>(i)];
      if (before < 5 || label == -100) {
        EXPECT_EQ(label, -100) << "a special token was chosen";
        EXPECT_EQ(now, before);
        tokens += before >= 5;
        continue;
      }
      EXPECT_EQ(label, before);
      ++tokens;
      ++chosen;
      masked += now == 4;
      kept += now == before;
    }
  }
  const auto expect_share = [](double part, double all, double share) {
    EXPECT_NEAR(part / all, share, 4 * std::sqrt(share * (1 - share) / all));
  };
  expect_share(chosen, tokens, 0.15);
  // A random token may be the mask or the original one.
  expect_share(masked, chosen, 0.8 + 0.1 / kPieces);
  expect_share(kept, chosen, 0.1 + 0.1 / kPieces);
}

TEST(Masking, AWordsTokensAreChosenTogether) {
  const DataCollatorForLanguageModeling collator(masking_tokenizer(),
                                                 {.whole_word_mask = true, .seed = 3});
  const at::Tensor labels = collator(samples(40, 20), 1)["labels"];
  const at::Tensor chosen = labels.slice(1, 1, 41).ne(-100).view({40, 20, 2}); // 20 words at least
  EXPECT_TRUE(chosen.select(2, 0).equal(chosen.select(2, 1)));
  EXPECT_TRUE(chosen.any().item<bool>());
}

TEST(Masking, DrawsDependOnSeedEpochAndSampleAlone) {
  const DataCollatorForLanguageModeling collator(masking_tokenizer());
  const std::vector<TokenFeature> all = samples(12, 8);
  const Batch together = collator(all, 2);
  for (int64_t i = 0; i < std::ssize(all); ++i) {
    const Batch alone = collator({all[static_cast<size_t>(i)]}, 2);
    const int64_t length = alone["labels"].size(1);
    for (const char* name : {"input_ids", "labels"}) {
      EXPECT_TRUE(alone[name][0].equal(together[name][i].narrow(0, 0, length))) << name;
    }
  }
  EXPECT_FALSE(collator(all, 3)["labels"].equal(together["labels"]));
  const DataCollatorForLanguageModeling other(masking_tokenizer(), {.seed = 43});
  EXPECT_FALSE(other(all, 2)["labels"].equal(together["labels"]));
}

TEST(Masking, ALoaderMasksEachEpochAnewAndAResumedEpochAsBefore) {
  std::vector<std::vector<int64_t>> ids;
  for (const TokenFeature& feature : samples(20, 10)) {
    ids.push_back(feature.input_ids);
  }
  class Texts final : public Dataset {
   public:
    explicit Texts(std::vector<std::vector<int64_t>> ids) : ids_(std::move(ids)) {}
    int64_t size() const override { return std::ssize(ids_); }
    Batch collate(const std::vector<int64_t>& indices) const override {
      return collate_in_epoch(indices, 0);
    }
    Batch collate_in_epoch(const std::vector<int64_t>& indices, uint64_t epoch) const override {
      std::vector<TokenFeature> features;
      for (const int64_t index : indices) {
        features.push_back({.input_ids = ids_[static_cast<size_t>(index)], .index = index});
      }
      return collator_(features, epoch);
    }

   private:
    std::vector<std::vector<int64_t>> ids_;
    DataCollatorForLanguageModeling collator_{masking_tokenizer()};
  };
  const auto batches = [&](uint64_t epoch, int64_t skipped, int64_t workers) {
    DataLoader loader(std::make_shared<const Texts>(ids),
                      {.batch_size = 4, .shuffle = false, .num_workers = workers});
    loader.set_epoch(epoch);
    loader.set_cursor(skipped);
    std::vector<at::Tensor> labels;
    for (const Batch& batch : loader) {
      labels.push_back(batch["labels"].clone());
    }
    return labels;
  };
  const auto first = batches(0, 0, 0), second = batches(1, 0, 0), resumed = batches(1, 8, 2);
  ASSERT_EQ(resumed.size(), 3U);
  for (size_t i = 0; i < resumed.size(); ++i) {
    EXPECT_TRUE(resumed[i].equal(second[i + 2]));
    EXPECT_FALSE(resumed[i].equal(first[i + 2]));
  }
}

TEST(Masking, WhatCannotBeMaskedIsAnError) {
  const WordPieceTokenizer without({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"});
  EXPECT_NE(error_of([&] { DataCollatorForLanguageModeling collator(without); }).find("mask_token"),
            std::string::npos);
  EXPECT_THROW(DataCollatorForLanguageModeling(masking_tokenizer(), {.mlm_probability = 1.5}),
               InputError);
  EXPECT_THROW(DataCollatorForLanguageModeling(
                   masking_tokenizer(), {.mask_replace_prob = 0.8, .random_replace_prob = 0.3}),
               InputError);
}

} // namespace hasten
