// A text that is rewritten step by step and keeps for each byte where it came from.
// Threading: none; each call of encode() has its own.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "unicode_text.h"

namespace hasten::detail {

/// Bytes [begin, end) of the original text.
struct TextSpan {
  uint32_t begin = 0;
  uint32_t end = 0;
};

struct AlignedText {
  std::string text{}; // UTF-8
  bool tracked = false;
  std::vector<TextSpan> origin{}; // [byte of text]; empty if not tracked

  /// Appends a part of the original that begins there at byte `at`.
  void append_original(std::string_view part, size_t at) {
    text += part;
    for (size_t i = 0; tracked && i < part.size();) {
      const size_t begin = i;
      next_code(part, i);
      origin.insert(origin.end(), i - begin,
                    {static_cast<uint32_t>(at + begin), static_cast<uint32_t>(at + i)});
    }
  }
  void append(std::string_view bytes, TextSpan from) {
    text += bytes;
    if (tracked) {
      origin.insert(origin.end(), bytes.size(), from);
    }
  }
  void append(int32_t code, TextSpan from) {
    const size_t before = text.size();
    append_code(text, code);
    if (tracked) {
      origin.insert(origin.end(), text.size() - before, from);
    }
  }
  /// Appends bytes [begin, end) of another text with their origins.
  void append_from(const AlignedText& other, size_t begin, size_t end) {
    text.append(other.text, begin, end - begin);
    if (tracked) {
      origin.insert(origin.end(), other.origin.begin() + static_cast<ptrdiff_t>(begin),
                    other.origin.begin() + static_cast<ptrdiff_t>(end));
    }
  }
  /// Origin of byte `at`; an empty one if not tracked or the text is empty.
  TextSpan from(size_t at) const { return at < origin.size() ? origin[at] : TextSpan{}; }
  TextSpan from(size_t begin, size_t end) const { return {from(begin).begin, from(end - 1).end}; }
  AlignedText emptied() const { return {.tracked = tracked}; }

  /// Replaces the text.
  void rewrite(const std::vector<CodeChange>& codes) {
    AlignedText made = emptied();
    made.text.reserve(text.size());
    size_t at = 0;
    for (const CodeChange& code : codes) {
      made.append(code.code, code.change > 0 ? (at > 0 ? from(at - 1) : TextSpan{}) : from(at));
      for (int taken = code.change; tracked && taken <= 0 && at < text.size(); ++taken) {
        next_code(text, at);
      }
    }
    *this = std::move(made);
  }
};

} // namespace hasten::detail
