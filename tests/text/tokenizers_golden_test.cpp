// Ids, offsets, types and decoded texts of Python's tokenizers, for each kind of tokenizer.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/text/tokenizer.h"
#include "hasten/text/utf8.h"
#include "text/tokenizer_texts.h"

namespace hasten {

using testing_support::KindFolder;
using testing_support::TokenizerTexts;

constexpr size_t kTexts = 5000;
constexpr size_t kPairs = 1000;
constexpr size_t kFull = 300;
constexpr size_t kSplit = 300;
constexpr size_t kShown = 20;

uint32_t crc32(const std::string& text) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : text) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (0xEDB88320 & (0 - (crc & 1)));
    }
  }
  return ~crc;
}

template <typename Number>
Number number_at(const std::string& bytes, size_t at) {
  Number number{};
  std::memcpy(&number, bytes.data() + at, sizeof(number));
  return number;
}

std::string described(const Encoding& encoding) {
  std::string text;
  for (size_t i = 0; i < encoding.ids.size(); ++i) {
    const auto& [begin, end] = encoding.offset_mapping[i];
    for (const int64_t value : {encoding.ids[i], begin, end, encoding.token_type_ids[i]}) {
      text += std::to_string(value) + " ";
    }
    text += std::to_string(encoding.special_tokens_mask[i]) + "\n";
  }
  return text;
}

EncodeOptions pair_options(size_t number) {
  return {
      .max_length = static_cast<int64_t>(4 + number % 91),
      .truncation = std::array{TruncationStrategy::longest_first, TruncationStrategy::only_first,
                               TruncationStrategy::only_second}[number % 3],
      .truncation_side = number / 3 % 2 == 0 ? TokenSide::right : TokenSide::left,
      .return_offsets_mapping = true};
}

std::string described_pair(const Tokenizer& tokenizer, const std::string& text,
                           const std::string& pair, size_t number) {
  try {
    return described(tokenizer.encode(text, pair, pair_options(number)));
  } catch (const InputError&) {
    return "error"; // of only_first and only_second, which cannot remove enough
  }
}

class TokenizersGolden : public testing::TestWithParam<std::string> {
 protected:
  KindFolder folder{GetParam()};
  Tokenizer tokenizer = AutoTokenizer::from_pretrained(folder.path());
  std::string golden = read_file(testing_support::tokenizer_file(GetParam() + ".bin"));
  TokenizerTexts texts{};
};

TEST_P(TokenizersGolden, EqualsTheReferenceOnTextsOfAllScripts) {
  size_t full = 4 * (kTexts + kPairs);
  size_t wrong = 0;
  for (size_t number = 0; number < kTexts; ++number) {
    const std::string text = replace_invalid_utf8(texts[number]);
    const auto encoding = tokenizer.encode(text, {.return_offsets_mapping = true});
    ASSERT_EQ(tokenizer.encode(text).ids, encoding.ids) << "without offsets: " << text;
    ASSERT_EQ(encoding.attention_mask, std::vector<int64_t>(encoding.ids.size(), 1));
    const std::string shown =
        tokenizer.decode(encoding.ids, {.skip_special_tokens = number % 2 == 0});
    if (crc32(described(encoding) + shown) != number_at<uint32_t>(golden, 4 * number)) {
      EXPECT_GT(++wrong, 5u) << number << ": " << text << "\n" << described(encoding) << shown;
    }
    if (number < kFull) {
      std::vector<int64_t> ids(number_at<uint16_t>(golden, full));
      full += 2;
      for (int64_t& id : ids) {
        id = number_at<uint16_t>(golden, full);
        full += 2;
      }
      EXPECT_EQ(encoding.ids, ids) << number << ": " << text;
    }
  }
  EXPECT_EQ(wrong, 0u) << "of " << kTexts << " texts";
  EXPECT_EQ(full, golden.size());
}

TEST_P(TokenizersGolden, PairsAreTruncatedAsTheReferenceDoesIt) {
  size_t errors = 0;
  for (size_t number = 0; number < kPairs; ++number) {
    const std::string text = replace_invalid_utf8(texts[number]);
    const std::string pair = replace_invalid_utf8(texts[number + 1]);
    const std::string made = described_pair(tokenizer, text, pair, number);
    errors += made == "error";
    ASSERT_EQ(crc32(made), number_at<uint32_t>(golden, 4 * (kTexts + number)))
        << number << ": " << text << " | " << pair << "\n"
        << made;
  }
  EXPECT_LT(errors, kPairs / 2);
}

std::string described_words(const Encoding& encoding) {
  std::string text;
  for (size_t i = 0; i < encoding.ids.size(); ++i) {
    const auto& [begin, end] = encoding.offset_mapping[i];
    for (const int64_t value : {encoding.ids[i], begin, end, encoding.special_tokens_mask[i]}) {
      text += std::to_string(value) + " ";
    }
    text += std::to_string(encoding.word_ids[i]) + "\n";
  }
  return text;
}

// Text `number` as words.
Encoding encoded_words(const Tokenizer& tokenizer, const std::string& text, size_t number) {
  EncodeOptions options{.return_offsets_mapping = true, .return_word_ids = true};
  if (number % 2 == 1) {
    options.max_length = static_cast<int64_t>(4 + number % 91);
    options.truncation_side = number / 2 % 2 == 0 ? TokenSide::right : TokenSide::left;
  }
  const auto words = split(text, " ");
  const Encoding made = tokenizer.encode_words(words, options);
  options.return_offsets_mapping = false; // perhaps the short way
  EXPECT_EQ(tokenizer.encode_words(words, options).ids, made.ids);
  EXPECT_EQ(tokenizer.encode_words(words, options).word_ids, made.word_ids);
  return made;
}

TEST(TokenizersGoldenWords, WordIdsOfTextsAndOfWordsEqualTheReference) {
  const std::string golden = read_file(testing_support::tokenizer_file("words.bin"));
  TokenizerTexts texts;
  size_t at = 0;
  for (const char* kind :
       {"bert", "bert_cased", "roberta", "gpt2", "gpt2_prefix", "modernbert", "llama3", "qwen",
        "llama2", "mistral", "xlm_roberta", "other_unigram", "other_bpe", "other_word_piece"}) {
    SCOPED_TRACE(kind);
    const KindFolder folder(kind);
    const Tokenizer tokenizer = AutoTokenizer::from_pretrained(folder.path());
    size_t shown = at + 8 * kSplit;
    const auto next = [&]<typename Number>(Number) {
      shown += 2;
      return int64_t{number_at<Number>(golden, shown - 2)};
    };
    for (size_t number = 0; number < kSplit; ++number, at += 8) {
      const std::string text = replace_invalid_utf8(texts[number]);
      const auto plain = tokenizer.encode(text, {.return_word_ids = true}).word_ids;
      const auto word_ids =
          joined(mapped(plain, [](int64_t id) { return std::to_string(id); }), " ");
      EXPECT_EQ(crc32(word_ids), number_at<uint32_t>(golden, at)) << text << "\n" << word_ids;
      const Encoding words = encoded_words(tokenizer, text, number);
      for (size_t i = 0; number < kShown && i < 2 * words.ids.size() + 1; ++i) {
        const size_t count = words.ids.size();
        const int64_t expected = i > count ? next(int16_t{}) : next(uint16_t{});
        ASSERT_EQ(i == 0      ? std::ssize(words.ids)
                  : i > count ? words.word_ids[i - count - 1]
                              : words.ids[i - 1],
                  expected)
            << i << " of " << count << " of " << text;
      }
      ASSERT_EQ(crc32(described_words(words)), number_at<uint32_t>(golden, at + 4))
          << number << ": " << text << "\n"
          << described_words(words);
    }
    at = shown;
  }
  EXPECT_EQ(at, golden.size());
}

TEST(TokenizerWords, WordsWithoutTokensHaveNoneAndPadsAreNoWords) {
  const KindFolder folder("bert");
  const Tokenizer tokenizer = AutoTokenizer::from_pretrained(folder.path());
  const std::vector<std::string> words{"", "the", "\x01", "the"};
  const Encoding encoding = tokenizer.encode_words(words, {.return_word_ids = true});
  EXPECT_EQ(encoding.word_ids, (std::vector<int64_t>{-1, 1, 3, -1}));
  EXPECT_TRUE(tokenizer.encode_words(words).word_ids.empty());
  std::vector<Encoding> both{tokenizer.encode_words({}, {.return_word_ids = true}), encoding};
  Tokenizer::pad(both, {.padding_side = TokenSide::left});
  EXPECT_EQ(both[0].word_ids, (std::vector<int64_t>{-1, -1, -1, -1}));
  try {
    tokenizer.encode_words(std::vector<std::string>{"the", "a\xFF"});
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("words[1]: byte 0xFF at position=1"),
              std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizersGolden,
                         testing::ValuesIn(testing_support::tokenizer_kinds()),
                         [](const auto& info) { return info.param; });

} // namespace hasten
