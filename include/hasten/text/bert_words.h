// Cleans text and splits it into words by BERT's rules. The tokenizer and the learning of a
// vocabulary use it.
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hasten {
struct WordPieceOptions;
}

namespace hasten::detail {

/// A word: bytes [begin, end) of BertWords::text.
struct BertWord {
  size_t begin = 0;
  size_t end = 0;
  int64_t characters = 0;
};

/// Working memory and result. Reuse it to save allocations.
struct BertWords {
  std::string text{}; // the words, concatenated, UTF-8
  std::vector<BertWord> words{};
  std::string run{}; // cleaned code points that are not yet normalised, UTF-8

  std::string_view operator[](size_t i) const {
    return std::string_view(text).substr(words[i].begin, words[i].end - words[i].begin);
  }
};

/// Replaces the content of `words` by the words of `text`. `text` must be valid UTF-8.
void split_bert_words(std::string_view text, const WordPieceOptions& options, BertWords& words);

} // namespace hasten::detail
