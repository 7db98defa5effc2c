// UTF-8 functions for readers and tokenizers.
// Threading: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hasten {

/// Index of the first byte that is not part of a valid UTF-8 sequence (overlong forms and
/// surrogates are invalid), or npos if all are. Cost: about 1 ns for 8 ASCII bytes.
size_t invalid_utf8_position(std::string_view text);

/// The text with U+FFFD in place of what is not UTF-8, as Python's errors="replace" gives it: one
/// for each longest beginning of a sequence, or for a single byte.
std::string replace_invalid_utf8(std::string_view text);

/// Number of code points in valid UTF-8.
size_t utf8_length(std::string_view text);

/// The byte as messages show it: "byte 0xE9".
std::string byte_name(char byte);

/// Whether the text has only ASCII white space and no-break spaces, or is empty.
bool is_blank(std::string_view text);

/// `text` without ASCII white space at both ends, as a view.
std::string_view trimmed(std::string_view text);

} // namespace hasten
