#include "text_tokens.h"

#include <algorithm>
#include <string>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

// Lengths of a text and its pair for longest_first; together at most `most`.
std::pair<size_t, size_t> longest_first(size_t first, size_t second, size_t most) {
  const bool swapped = first > second;
  size_t shorter = std::min(first, second);
  size_t longer = shorter > most ? shorter : std::max(shorter, most - shorter);
  if (shorter + longer > most) {
    shorter = most / 2;
    longer = shorter + most % 2;
  }
  return swapped ? std::pair(longer, shorter) : std::pair(shorter, longer);
}

void truncate_tokens(TextTokens& first, TextTokens* second, size_t most,
                     const EncodeOptions& options, TokenSide side) {
  const size_t all = first.tokens.size() + (second != nullptr ? second->tokens.size() : 0);
  if (all <= most) {
    return;
  }
  auto lengths = std::pair(first.tokens.size(), all - first.tokens.size());
  if (most == 0) {
    lengths = {0, 0};
  } else if (options.truncation == TruncationStrategy::longest_first) {
    lengths = second != nullptr ? longest_first(lengths.first, lengths.second, most)
                                : std::pair(most, size_t{0});
  } else {
    const bool only_first = options.truncation == TruncationStrategy::only_first;
    auto& length = only_first ? lengths.first : lengths.second;
    if (length <= all - most) {
      throw InputError(
          kTokenizer,
          std::string("truncation=") + (only_first ? "only_first" : "only_second") +
              " cannot remove tokens=" + std::to_string(all - most) +
              ", because the sequence has " + std::to_string(length),
          "a sequence that is longer than what is too much",
          "use longest_first, or raise max_length=" + std::to_string(options.max_length));
    }
    length -= all - most;
  }
  const auto cut = [&](TextTokens& of, size_t length) {
    if (of.tokens.size() <= length) {
      return;
    }
    const auto cut_values = [&](auto& values) {
      const auto drop = std::ssize(values) - static_cast<ptrdiff_t>(length);
      if (drop > 0 && side == TokenSide::left) {
        values.erase(values.begin(), values.begin() + drop);
      } else if (drop > 0) {
        values.resize(length);
      }
    };
    cut_values(of.tokens);
    cut_values(of.words);
    of.cut = true;
  };
  cut(first, lengths.first);
  if (second != nullptr) {
    cut(*second, lengths.second);
  }
}

} // namespace detail

void Tokenizer::pad(std::vector<Encoding>& encodings, const PaddingOptions& options) {
  size_t length = static_cast<size_t>(std::max<int64_t>(options.pad_to_length, 0));
  for (const Encoding& encoding : encodings) {
    if (options.pad_to_length > 0 && encoding.ids.size() > length) {
      throw InputError(detail::kTokenizer,
                       "an encoding has ids=" + std::to_string(encoding.ids.size()),
                       "at most pad_to_length=" + std::to_string(options.pad_to_length),
                       "encode with max_length");
    }
    length = std::max(length, encoding.ids.size());
  }
  if (options.pad_id < 0 || options.pad_to_multiple_of < 1) {
    throw InputError(detail::kTokenizer,
                     "pad_id=" + std::to_string(options.pad_id) +
                         ", pad_to_multiple_of=" + std::to_string(options.pad_to_multiple_of),
                     "the id of a pad token, and at least 1", "give the tokenizer a pad_token");
  }
  const auto multiple = static_cast<size_t>(options.pad_to_multiple_of);
  length = options.pad_to_length > 0 ? length : (length + multiple - 1) / multiple * multiple;
  for (Encoding& encoding : encodings) {
    const size_t missing = length - encoding.ids.size();
    const auto fill = [&](auto& values, const auto& value) {
      values.insert(options.padding_side == TokenSide::left ? values.begin() : values.end(),
                    missing, value);
    };
    if (!encoding.offset_mapping.empty()) {
      fill(encoding.offset_mapping, std::pair<int64_t, int64_t>());
    }
    if (!encoding.word_ids.empty()) {
      fill(encoding.word_ids, int64_t{-1});
    }
    fill(encoding.ids, options.pad_id);
    fill(encoding.token_type_ids, int64_t{0});
    fill(encoding.attention_mask, int64_t{0});
    fill(encoding.special_tokens_mask, int64_t{1});
  }
}

} // namespace hasten
