// Ids of transformers for texts of all Unicode classes.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "hasten/text/tokenizer.h"
#include "text/wordpiece_golden.h"

namespace hasten {

const nlohmann::json& wordpiece_golden() {
  static const auto golden = nlohmann::json::parse(golden::kWordpiece);
  return golden;
}

WordPieceTokenizer golden_tokenizer(const std::string& config) {
  const auto& given = wordpiece_golden()["configs"][config];
  WordPieceOptions options{.do_lower_case = given["do_lower_case"].get<bool>(),
                           .tokenize_chinese_chars = given.value("tokenize_chinese_chars", true)};
  if (given.contains("strip_accents")) {
    options.strip_accents = given["strip_accents"].get<bool>();
  }
  return WordPieceTokenizer(wordpiece_golden()["vocab"].get<std::vector<std::string>>(), options);
}

TEST(WordPieceGolden, IdsEqualThoseOfTransformersInEveryConfiguration) {
  const auto& cases = wordpiece_golden()["cases"];
  ASSERT_GE(cases.size(), 200u);
  for (const std::string config : {"uncased", "cased", "lower_with_accents"}) {
    const auto tokenizer = golden_tokenizer(config);
    for (const auto& one : cases) {
      EXPECT_EQ(tokenizer.encode(one["text"].get<std::string>()).ids,
                one[config].get<std::vector<int64_t>>())
          << config << ": " << one["text"].dump(-1, ' ', true);
    }
  }
}

TEST(WordPieceGolden, TruncationCountsSpecialTokensAsTransformersDoes) {
  const auto tokenizer = golden_tokenizer("uncased");
  for (const auto& one : wordpiece_golden()["truncated"]) {
    const auto text = one["text"].get<std::string>();
    const auto encoding = tokenizer.encode(text, {.max_length = one["max_length"].get<int64_t>()});
    EXPECT_EQ(encoding.ids, one["ids"].get<std::vector<int64_t>>()) << one;
    EXPECT_EQ(encoding.truncated, tokenizer.encode(text).ids.size() > encoding.ids.size());
  }
}

} // namespace hasten
