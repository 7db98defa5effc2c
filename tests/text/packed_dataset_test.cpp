// Documents in rows, and how files become documents.
#include "hasten/text/packed_dataset.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "hasten/base/error.h"
#include "hasten/text/token_cache.h"
#include "support/error_of.h"
#include "text/tokenizer_texts.h"

namespace hasten::packed_dataset_test {

using testing_support::error_of;

struct Documents : TokenIds {
  std::vector<int32_t> ids{};
  std::vector<TokenRow> rows{};
  int64_t size() const override { return std::ssize(ids); }
  void read(int64_t begin, std::span<int32_t> out) const override {
    std::copy_n(ids.begin() + begin, out.size(), out.begin());
  }
};

/// Document d has the ids 100 d, 100 d + 1, … and a prompt of prompts[d] tokens.
TokenTable documents(const std::vector<int>& tokens, const std::vector<int>& prompts = {}) {
  const auto made = std::make_shared<Documents>();
  for (size_t d = 0; d < tokens.size(); ++d) {
    made->rows.push_back(
        {.begin = made->size(), .tokens = tokens[d], .label = prompts.empty() ? 0 : prompts[d]});
    for (int i = 0; i < tokens[d]; ++i) {
      made->ids.push_back(static_cast<int32_t>(100 * d) + i);
    }
  }
  return {.ids = made, .rows = made->rows, .owner = made};
}

std::vector<int64_t> values(const Batch& batch, const char* name, int64_t row = 0) {
  const at::Tensor of = batch[name][row].contiguous();
  return {of.const_data_ptr<int64_t>(), of.const_data_ptr<int64_t>() + of.numel()};
}

using Values = std::vector<int64_t>;

TEST(PackedDataset, BestFitFillsRowsAndKeepsDocumentsApart) {
  const PackedDataset rows(documents({3, 6, 2, 9, 1}), 8, PackingStrategy::bfd_split, 7);
  // 9 is cut into 8 and 1; pieces of one token have no loss.
  ASSERT_EQ(rows.size(), 3);
  const Batch batch = rows.collate({0, 1, 2});
  EXPECT_EQ(values(batch, "input_ids", 0), (Values{0, 1, 2, 7, 7, 7, 7, 7}));
  EXPECT_EQ(values(batch, "input_ids", 1), (Values{100, 101, 102, 103, 104, 105, 200, 201}));
  EXPECT_EQ(values(batch, "labels", 1), (Values{-100, 101, 102, 103, 104, 105, -100, 201}));
  EXPECT_EQ(values(batch, "position_ids", 1), (Values{0, 1, 2, 3, 4, 5, 0, 1}));
  EXPECT_EQ(values(batch, "labels", 0), (Values{-100, 1, 2, -100, -100, -100, -100, -100}));
  EXPECT_EQ(values(batch, "attention_mask", 0), (Values{1, 1, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(rows.length(0), 3);
  EXPECT_FALSE(rows.collate({0, 2}).has("position_ids"));
}

TEST(PackedDataset, EveryTokenIsInOneRowAndTheFullestRowsAreFull) {
  std::vector<int> tokens;
  for (int d = 0; d < 200; ++d) {
    tokens.push_back(2 + d * 37 % 61);
  }
  const int64_t all = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
  for (const auto strategy :
       {PackingStrategy::bfd_split, PackingStrategy::wrapped, PackingStrategy::none}) {
    const PackedDataset rows(documents(tokens), 64, strategy, 0);
    std::multiset<int64_t> seen;
    for (int64_t row = 0; row < rows.size(); ++row) {
      const Values ids = values(rows.collate({row}), "input_ids");
      EXPECT_LE(ids.size(), 64U);
      seen.insert(ids.begin(), ids.end());
    }
    EXPECT_EQ(std::ssize(seen), all);
    EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), seen.size());
    if (strategy != PackingStrategy::none) { // little is padding
      EXPECT_LE(rows.size(), 1.02 * static_cast<double>(all) / 64 + 1);
    }
  }
}

TEST(PackedDataset, WrappedRowsPredictTheNextDocument) {
  const PackedDataset rows(documents({3, 4, 2}), 4, PackingStrategy::wrapped, 7);
  ASSERT_EQ(rows.size(), 3);
  const Batch batch = rows.collate({0, 1, 2});
  EXPECT_EQ(values(batch, "input_ids", 0), (Values{0, 1, 2, 100}));
  EXPECT_EQ(values(batch, "labels", 0), (Values{0, 1, 2, 100}));
  EXPECT_EQ(values(batch, "input_ids", 2), (Values{201, 7, 7, 7}));
  EXPECT_FALSE(batch.has("position_ids"));
}

TEST(PackedDataset, PromptsHaveNoLoss) {
  for (const auto strategy : {PackingStrategy::bfd_split, PackingStrategy::wrapped}) {
    const PackedDataset rows(documents({4, 3}, {2, 1}), 7, strategy, 7);
    EXPECT_EQ(values(rows.collate({0}), "labels"), (Values{-100, -100, 2, 3, -100, 101, 102}));
  }
  EXPECT_NE(error_of([] {
              PackedDataset(documents({4, 1}, {4, 0}), 8, PackingStrategy::none, 0);
            }).find("no token to predict"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              PackedDataset(documents({4}), 1, PackingStrategy::none, 0);
            }).find("block_size=1"),
            std::string::npos);
}

Tokenizer byte_tokenizer() {
  const testing_support::KindFolder folder("gpt2");
  write_file_atomically(folder / "tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
  return AutoTokenizer::from_pretrained(folder.path());
}

TokenizedClassification read(const std::string& name, const std::string& text,
                             const std::function<void(TokenizedClassificationOptions&)>& change) {
  TokenizedClassificationOptions options{.tokenizer = byte_tokenizer()};
  options.texts.table.problem_type = ProblemType::unlabelled;
  options.texts.table.label_column.clear();
  options.texts.table.documents = true;
  change(options);
  const TextFiles file = TextFile::of_text(name, text);
  options.texts.table = with_document_columns(file, options.texts.table);
  return tokenize_text_classification(file, {}, options);
}

std::vector<std::string> texts_of(const TokenizedClassification& data) {
  std::vector<std::string> texts;
  for (const TokenRow& row : data.train.rows) {
    std::vector<int32_t> ids(static_cast<size_t>(row.tokens));
    data.train.ids->read(row.begin, ids);
    texts.push_back(data.tokenizer.decode({ids.begin(), ids.end()}));
  }
  return texts;
}

TEST(Documents, AreLinesParagraphsOrFilesAndEndWithEos) {
  const std::string text = "\xEF\xBB\xBFone two\r\nthree\n \n\nfour\n";
  const std::string end = "<|endoftext|>";
  const auto by = [&](SampleBy how) {
    return texts_of(read("a.txt", text, [&](auto& o) { o.texts.table.sample_by = how; }));
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(by(SampleBy::line), (Texts{"one two" + end, "three" + end, "four" + end}));
  EXPECT_EQ(by(SampleBy::paragraph), (Texts{"one two\nthree" + end, "four" + end}));
  EXPECT_EQ(by(SampleBy::document), (Texts{"one two\nthree\n \n\nfour" + end}));
  const auto bad = [] { read("a.txt", "fine\nb\xff\n", [](auto&) {}); };
  EXPECT_NE(error_of(bad).find("a.txt:2"), std::string::npos) << error_of(bad);
}

TEST(Documents, ACompletionFollowsItsPrompt) {
  const std::string lines = "{\"prompt\": \"1 + 1 =\", \"completion\": \" 2\"}\n";
  const auto data = read("a.jsonl", lines, [](auto&) {});
  EXPECT_EQ(texts_of(data), (std::vector<std::string>{"1 + 1 = 2<|endoftext|>"}));
  const int32_t prompt = data.train.rows[0].label;
  EXPECT_EQ(prompt, std::ssize(data.tokenizer.encode("1 + 1 =").ids));
  const auto cut = [&](int64_t length) {
    return read("a.jsonl", lines, [&](auto& o) { o.max_length = length; });
  };
  EXPECT_EQ(cut(prompt + 1).truncated, 1);
  for (const auto& [what, said] : std::vector<std::pair<std::function<void()>, std::string>>{
           {[&] { cut(prompt); }, "a.jsonl:1: the prompt has tokens=" + std::to_string(prompt)},
           {[&] {
              read("a.jsonl", lines + "{\"prompt\": \"x\", \"completion\": \" \"}\n", [](auto&) {});
            },
            "a.jsonl:2: completion is empty"},
           {[] { read("a.jsonl", "{\"prompt\": \"x\"}\n", [](auto&) {}); }, "completion"},
           {[] { read("a.jsonl", "{\"messages\": []}\n", [](auto&) {}); }, "chat template"},
           {[] {
              read("a.csv", "text\nx\n", [](auto& o) {
                o.tokenizer =
                    WordPieceTokenizer({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x"});
              });
            },
            "eos_token"}}) {
    EXPECT_NE(error_of(what).find(said), std::string::npos) << error_of(what);
  }
}

} // namespace hasten::packed_dataset_test
