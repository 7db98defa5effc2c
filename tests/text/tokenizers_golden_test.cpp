// Ids, offsets, types and decoded texts of Python's tokenizers, for each kind of tokenizer.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "hasten/base/error.h"
#include "hasten/text/tokenizer.h"
#include "hasten/text/utf8.h"
#include "text/tokenizer_texts.h"

namespace hasten {

using testing_support::KindFolder;
using testing_support::TokenizerTexts;

constexpr size_t kTexts = 5000;
constexpr size_t kPairs = 1000;
constexpr size_t kFull = 300;

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

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizersGolden,
                         testing::ValuesIn(testing_support::tokenizer_kinds()),
                         [](const auto& info) { return info.param; });

} // namespace hasten
