#include "hasten/text/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace hasten {

namespace detail {

constexpr uint64_t kHighBits = 0x8080808080808080ull;

bool eight_ascii_bytes(const char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return (word & kHighBits) == 0;
}

bool is_ascii_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

} // namespace detail

size_t invalid_utf8_position(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      while (at + 8 <= text.size() && detail::eight_ascii_bytes(text.data() + at)) {
        at += 8;
      }
      while (at < text.size() && static_cast<unsigned char>(text[at]) < 0x80) {
        ++at;
      }
      continue;
    }
    utf8proc_int32_t code = 0;
    const auto bytes = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at),
                                        static_cast<utf8proc_ssize_t>(text.size() - at), &code);
    if (bytes <= 0) {
      return at;
    }
    at += static_cast<size_t>(bytes);
  }
  return std::string_view::npos;
}

size_t utf8_length(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

std::string byte_name(char byte) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  const auto value = static_cast<unsigned char>(byte);
  return std::string("byte 0x") + kDigits[value >> 4] + kDigits[value & 15];
}

bool is_blank(std::string_view text) {
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '\xC2' && at + 1 < text.size() && text[at + 1] == '\xA0') {
      ++at; // U+00A0: spreadsheets leave it in cells that look empty
    } else if (!detail::is_ascii_blank(text[at])) {
      return false;
    }
  }
  return true;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && detail::is_ascii_blank(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && detail::is_ascii_blank(text.back())) {
    text.remove_suffix(1);
  }
  return text;
}

} // namespace hasten
