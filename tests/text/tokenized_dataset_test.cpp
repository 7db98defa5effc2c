#include "hasten/text/tokenized_dataset.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "hasten/data/loader.h"

namespace hasten {

at::Tensor longs(const std::vector<int64_t>& values, at::IntArrayRef shape) {
  return at::tensor(at::IntArrayRef(values), at::kLong).view(shape);
}

const std::vector<std::vector<int64_t>> kRows{{2, 7, 3}, {2, 3}, {2, 7, 8, 9, 3}};

TEST(TokenizedDataset, PaddingOnTheLeftEndsAllRowsTogether) {
  const TokenizedDataset dataset(kRows, {}, {.pad_id = 6, .padding_side = TokenSide::left});
  const auto batch = dataset.collate({1, 0});
  EXPECT_TRUE(at::equal(batch["input_ids"], longs({6, 2, 3, 2, 7, 3}, {2, 3})));
  EXPECT_TRUE(at::equal(batch["attention_mask"], longs({0, 1, 1, 1, 1, 1}, {2, 3})));
  EXPECT_THROW(TokenizedDataset(kRows, {}, {.pad_id = -1}), InputError);
}

TEST(TokenizedDataset, PadsToTheLongestRowOfTheBatch) {
  const TokenizedDataset dataset(kRows, {1, 0, 1}, {.pad_id = 6});
  const auto batch = dataset.collate({1, 0});
  EXPECT_TRUE(at::equal(batch["input_ids"], longs({2, 3, 6, 2, 7, 3}, {2, 3})));
  EXPECT_TRUE(at::equal(batch["attention_mask"], longs({1, 1, 0, 1, 1, 1}, {2, 3})));
  EXPECT_TRUE(at::equal(batch["labels"], longs({0, 1}, {2})));
  EXPECT_EQ(batch.indices, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(dataset.length(2), 5);
  EXPECT_TRUE(batch.padded);
  EXPECT_FALSE(dataset.collate({0, 0}).padded);
  EXPECT_TRUE(TokenizedDataset(kRows, {}, {.pad_to_length = 6}).collate({0, 0}).padded);
}

TEST(TokenizedDataset, PaddingOptionsSetTheLength) {
  const auto length = [](PaddingOptions padding) {
    return TokenizedDataset(kRows, {}, padding).collate({0, 2})["input_ids"].size(1);
  };
  EXPECT_EQ(length({}), 5);
  EXPECT_EQ(length({.pad_to_multiple_of = 8}), 8);
  EXPECT_EQ(length({.pad_to_length = 16}), 16);
}

TEST(TokenizedDataset, ABatchOfNoRowsHasShapes) {
  const auto batch = TokenizedDataset(kRows, {1, 0, 1}).collate({});
  EXPECT_EQ(batch["input_ids"].sizes(), (at::IntArrayRef{0, std::ssize(kRows[0])}));
  EXPECT_EQ(batch["labels"].sizes(), (at::IntArrayRef{0}));
  EXPECT_FALSE(TokenizedDataset(kRows, {}).collate({0}).has("labels"));
}

TEST(TokenizedDataset, LoaderGroupsItsRowsByTokens) {
  auto dataset = std::make_shared<TokenizedDataset>(kRows, std::vector<int64_t>{});
  const DataLoader loader(dataset, {.batch_size = 1, .shuffle = false});
  std::vector<int64_t> order;
  for (const Batch& batch : loader) {
    order.push_back(batch.indices.at(0));
  }
  EXPECT_EQ(order, (std::vector<int64_t>{2, 0, 1}));
}

TEST(TokenizedDataset, WrongRowsAreNamed) {
  EXPECT_THROW(TokenizedDataset(kRows, {1}), InputError);
  EXPECT_THROW(TokenizedDataset({{1}, {}}, {}), InputError);
  EXPECT_THROW(TokenizedDataset({{-1}}, {}), InputError);
  EXPECT_THROW(TokenizedDataset(kRows, {}, {.pad_to_length = 4}), InputError);
}

TEST(TokenizeTexts, ThreadsDoNotChangeTheResult) {
  const WordPieceTokenizer tokenizer({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"}, {});
  std::vector<std::string> texts;
  for (int row = 0; row < 100; ++row) {
    texts.push_back(std::string(row % 7, ' ') + (row % 3 ? "a b" : "a a b b"));
  }
  const auto one = tokenize_texts(tokenizer, texts, 5, 1);
  const auto three = tokenize_texts(tokenizer, texts, 5, 3);
  EXPECT_EQ(one.ids, three.ids);
  EXPECT_EQ(three.truncated, 34);
  EXPECT_EQ(three.tokens, 34 * 5 + 66 * 4);
  EXPECT_EQ(one.ids[0], (std::vector<int64_t>{2, 4, 4, 5, 3}));
}

TEST(TokenizeTexts, TheFirstBadRowIsNamed) {
  const WordPieceTokenizer tokenizer({"[PAD]", "[UNK]", "[CLS]", "[SEP]"}, {});
  std::vector<std::string> texts(64, "a");
  texts[20] = texts[60] = "\xFF";
  try {
    tokenize_texts(tokenizer, texts, 0, 2);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("row=20"), std::string::npos);
  }
}

} // namespace hasten
