// What readers and tokenizers need to know of UTF-8.
// Threading: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hasten {

/// Index of the first byte that does not belong to a valid UTF-8 sequence
/// (overlong forms and surrogates are invalid); npos where all do.
/// Cost: about 1 ns for 8 ASCII bytes.
size_t invalid_utf8_position(std::string_view text);

/// Number of code points in valid UTF-8.
size_t utf8_length(std::string_view text);

/// "byte 0xE9" and the like, for messages.
std::string byte_name(char byte);

/// Whether the text holds nothing but ASCII white space and no-break spaces.
bool is_blank(std::string_view text);

/// Without the ASCII white space at both ends; a view into `text`.
std::string_view trimmed(std::string_view text);

} // namespace hasten
