// The tokens of a text before special tokens are added, and their truncation.
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/text/tokenizer.h"
#include "token_model.h"

namespace hasten::detail {

inline constexpr const char* kTokenizer = "text::Tokenizer";

struct TextTokens {
  std::string_view text{}; // empty if the text is given as words
  std::span<const std::string> given{}; // the words
  std::vector<WordToken> tokens{}; // with the bytes of the text, if these are asked for
  std::vector<int64_t> words{}; // [token] index of its word; empty if it is not needed
  bool cut = false; // tokens are missing
};

/// Leaves at most `most` tokens of a text and its pair, which may be null. Throws InputError if
/// only_first or only_second cannot do that.
void truncate_tokens(TextTokens& first, TextTokens* second, size_t most,
                     const EncodeOptions& options, TokenSide side);

} // namespace hasten::detail
