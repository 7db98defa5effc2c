// Characters of UTF-8 texts and their classes, as the tokenizers need them.
// Threading: pure functions.
#pragma once

#include <utf8proc.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hasten::detail {

/// The character at byte `at` of valid UTF-8; `at` moves behind it.
inline int32_t next_code(std::string_view text, size_t& at) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at;
  if (*bytes < 0x80) {
    ++at;
    return *bytes;
  }
  utf8proc_int32_t code = 0;
  const auto used = utf8proc_iterate(bytes, static_cast<utf8proc_ssize_t>(text.size() - at), &code);
  at += used > 0 ? static_cast<size_t>(used) : 1;
  return used > 0 ? code : 0xFFFD;
}

/// First byte of the character that ends before byte `end` > 0.
inline size_t code_before(std::string_view text, size_t end) {
  do {
    --end;
  } while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

inline void append_code(std::string& text, int32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  utf8proc_uint8_t bytes[4];
  const auto used = utf8proc_encode_char(code, bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(used));
}

bool is_ascii(std::string_view text);
/// Unicode's White_Space.
bool is_white_space(int32_t code);
/// What \w matches in Rust's regular expressions.
bool is_word_code(int32_t code);
/// Punctuation as BERT has it: all ASCII characters that are no letters, digits or controls, and
/// Unicode's punctuation.
bool is_bert_punctuation(int32_t code);
/// What BERT separates by spaces. BERT has 2B920 where Unicode has 2B820.
bool is_bert_ideograph(int32_t code);
bool is_number(int32_t code);
bool is_mark(int32_t code);
/// Appends the lower case, which for one letter has two characters.
void append_lower(std::string& text, int32_t code);

/// A character of a rewritten text. `change` says what it does to the old text, read from left to
/// right: 0 replaces the next character, 1 is inserted, -n replaces one and removes the n after it.
struct CodeChange {
  int32_t code = 0;
  int change = 0;
};

enum class NormalForm { nfc, nfd, nfkc, nfkd };

std::vector<CodeChange> normal_form(std::string_view text, NormalForm form);

} // namespace hasten::detail
