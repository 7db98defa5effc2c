// Samples of pairs, of words with labels and without labels, from a file to a batch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "hasten/text/token_cache.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::error_of;
using testing_support::TemporaryFolder;

namespace {

TokenizedClassificationOptions task_options(ProblemType type, const std::string& label_column) {
  TokenizedClassificationOptions options;
  options.texts.table.problem_type = type;
  options.texts.table.label_column = label_column;
  options.vocab = {.vocab_size = 60, .min_frequency = 1};
  return options;
}

TokenizedClassification tokenized(const std::string& name, const std::string& text,
                                  const TokenizedClassificationOptions& options) {
  return tokenize_text_classification(TextFile::of_text(name, text), {}, options);
}

std::vector<int64_t> row_of(const Batch& batch, const char* name, int64_t row) {
  const at::Tensor values = batch[name][row].contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

constexpr const char* kPairs =
    "premise,hypothesis,label\na man eats,he sleeps now,no\na dog runs far,it moves,yes\n";

TokenizedClassificationOptions pair_options() {
  auto options = task_options(ProblemType::single_label, "label");
  options.texts.table.text_column = "premise";
  options.texts.table.text_pair_column = "hypothesis";
  return options;
}

constexpr const char* kTagged =
    "{\"tokens\": [\"Ada\", \"Lovelace\", \"wrote\"], \"ner_tags\": "
    "[\"B-PER\", \"I-PER\", \"O\"]}\n"
    "{\"tokens\": [\"London\"], \"ner_tags\": [\"B-LOC\"]}\n";

TokenizedClassificationOptions tagged_options() {
  auto options = task_options(ProblemType::word_labels, "ner_tags");
  options.texts.table.text_column = "tokens";
  return options;
}

} // namespace

TEST(TaskSamples, PairsAreEncodedAsPairsAndTheirTypesAreInTheBatch) {
  const auto data = tokenized("pairs.csv", kPairs, pair_options());
  const TokenizedDataset dataset(data.train, data.tokenizer.padding());
  const Batch batch = dataset.collate({0, 1});
  const std::vector<std::pair<std::string, std::string>> texts{{"a man eats", "he sleeps now"},
                                                               {"a dog runs far", "it moves"}};
  for (size_t row = 0; row < texts.size(); ++row) {
    Encoding encoding = data.tokenizer.encode(texts[row].first, texts[row].second);
    const auto length = static_cast<size_t>(batch["input_ids"].size(1));
    encoding.ids.resize(length, data.tokenizer.pad_id());
    encoding.token_type_ids.resize(length, 0);
    EXPECT_EQ(row_of(batch, "input_ids", static_cast<int64_t>(row)), encoding.ids);
    EXPECT_EQ(row_of(batch, "token_type_ids", static_cast<int64_t>(row)), encoding.token_type_ids);
  }
  EXPECT_EQ(data.label_names, (std::vector<std::string>{"no", "yes"}));
}

TEST(TaskSamples, TheSecondTextDistinguishesSamples) {
  auto options = pair_options();
  const auto eval = TextFile::of_text(
      "eval.csv",
      "premise,hypothesis,label\na man eats,he sleeps now,no\na man eats,it moves,no\n");
  const auto data =
      tokenize_text_classification(TextFile::of_text("pairs.csv", kPairs), eval, options);
  EXPECT_EQ(data.report.duplicates, 1);
  EXPECT_EQ(std::ssize(data.eval.rows), 1);
}

TEST(TaskSamples, AWordsFirstTokenHasItsLabelAndNoOtherHas) {
  const auto data = tokenized("words.jsonl", kTagged, tagged_options());
  EXPECT_EQ(data.label_names, (std::vector<std::string>{"B-LOC", "B-PER", "I-PER", "O"}));
  const TokenizedDataset dataset(
      data.train,
      std::make_shared<const DataCollatorForTokenClassification>(data.tokenizer.padding()));
  const Batch batch = dataset.collate({0, 1});
  const std::vector<std::vector<int64_t>> labels{{1, 2, 3}, {0}};
  const std::vector<std::vector<std::string>> words{{"Ada", "Lovelace", "wrote"}, {"London"}};
  for (size_t row = 0; row < words.size(); ++row) {
    std::vector<int64_t> expected{kIgnoredLabel}; // [CLS]
    for (size_t word = 0; word < words[row].size(); ++word) {
      expected.push_back(labels[row][word]);
      const auto pieces = data.tokenizer.tokenize(words[row][word]).size();
      expected.insert(expected.end(), pieces - 1, kIgnoredLabel);
    }
    expected.resize(static_cast<size_t>(batch["input_ids"].size(1)), kIgnoredLabel);
    EXPECT_EQ(row_of(batch, "labels", static_cast<int64_t>(row)), expected);
  }
}

TEST(TaskSamples, ConllAndJsonLinesGiveTheSameTokens) {
  const auto lines = tokenized("words.jsonl", kTagged, tagged_options());
  const auto conll = tokenized(
      "words.conll", "Ada B-PER\nLovelace I-PER\nwrote O\n\nLondon B-LOC\n", tagged_options());
  EXPECT_EQ(lines.train_checksum, conll.train_checksum);
  EXPECT_EQ(lines.label_names, conll.label_names);
}

TEST(TaskSamples, TextsWithoutLabelsHaveWordIds) {
  auto options = task_options(ProblemType::unlabelled, "");
  const auto data = tokenized("texts.csv", "text\nsome words\nmore words here\n", options);
  EXPECT_TRUE(data.label_names.empty());
  const TokenizedDataset dataset(
      data.train,
      std::make_shared<const DataCollatorForLanguageModeling>(
          data.tokenizer, DataCollatorForLanguageModelingOptions{.mlm_probability = 1}));
  const at::Tensor labels = dataset.collate({1})["labels"][0];
  const Encoding encoding = data.tokenizer.encode("more words here");
  for (size_t token = 0; token < encoding.ids.size(); ++token) {
    EXPECT_EQ(labels[static_cast<int64_t>(token)].item<int64_t>(),
              encoding.special_tokens_mask[token] == 1 ? kIgnoredLabel : encoding.ids[token]);
  }
}

TEST(TaskSamples, ACacheFileGivesTheBatchesOfMemory) {
  const TemporaryFolder folder;
  for (auto options : {pair_options(), tagged_options()}) {
    const bool pairs = options.texts.table.problem_type == ProblemType::single_label;
    const std::string name = pairs ? "pairs.csv" : "words.jsonl";
    const std::string text = pairs ? kPairs : kTagged;
    const auto memory = tokenized(name, text, options);
    options.cache_dir = folder.path();
    tokenized(name, text, options);
    const auto read = tokenized(name, text, options);
    ASSERT_EQ(read.cache.source, TokenCacheReport::Source::read);
    const auto collator =
        std::make_shared<const DataCollatorForTokenClassification>(memory.tokenizer.padding());
    const auto batch = [&](const TokenTable& table) {
      return pairs ? TokenizedDataset(table).collate({0, 1})
                   : TokenizedDataset(table, collator).collate({0, 1});
    };
    const Batch first = batch(memory.train), second = batch(read.train);
    EXPECT_EQ(first.tensors.size(), second.tensors.size());
    for (const auto& [tensor, value] : first.tensors) {
      EXPECT_TRUE(value.equal(second[tensor])) << tensor;
    }
  }
}

TEST(TaskSamples, WhatDoesNotFitIsAnErrorWithItsLine) {
  auto same = pair_options();
  same.texts.table.text_pair_column = "premise";
  EXPECT_NE(error_of([&] { tokenized("pairs.csv", kPairs, same); }).find("is the text column"),
            std::string::npos);
  const std::string unequal = error_of([&] {
    tokenized("w.jsonl", std::string(kTagged) + R"({"tokens": ["a", "b"], "ner_tags": ["O"]})",
              tagged_options());
  });
  EXPECT_NE(unequal.find("w.jsonl:3: tokens has 2 words, but ner_tags has 1 labels"),
            std::string::npos)
      << unequal;
  auto known = tagged_options();
  known.texts.label_names = {"O", "B-PER", "I-PER"};
  const std::string unknown = error_of([&] { tokenized("w.jsonl", kTagged, known); });
  EXPECT_NE(unknown.find("w.jsonl:2: label=B-LOC is unknown to the model"), std::string::npos)
      << unknown;
}

} // namespace hasten
