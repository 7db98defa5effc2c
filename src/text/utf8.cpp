#include "hasten/text/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace hasten {

namespace detail {

constexpr uint64_t kHighBits = 0x8080808080808080ull;

bool eight_ascii_bytes(const char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return (word & kHighBits) == 0;
}

// Bytes of the invalid sequence that `text` begins with: as many as could begin a valid one.
size_t broken_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  const size_t wanted = lead >= 0xF0 && lead <= 0xF4 ? 4 : lead >= 0xE0 && lead < 0xF0 ? 3 : 1;
  size_t used = 1;
  for (; used < wanted && used < text.size(); ++used) {
    const unsigned least = used > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned most = used > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(used) < least || byte(used) > most) {
      break;
    }
  }
  return used;
}

constexpr std::string_view kAsciiBlank = " \t\n\v\f\r";

} // namespace detail

size_t invalid_utf8_position(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    if (at + 8 <= text.size() && detail::eight_ascii_bytes(text.data() + at)) {
      at += 8;
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

std::string replace_invalid_utf8(std::string_view text) {
  std::string made;
  for (;;) {
    const size_t bad = invalid_utf8_position(text);
    made += text.substr(0, bad);
    if (bad == std::string_view::npos) {
      return made;
    }
    made += "\xEF\xBF\xBD";
    text.remove_prefix(bad + detail::broken_bytes(text.substr(bad)));
  }
}

size_t utf8_length(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string byte_name(char byte) {
  char name[16];
  std::snprintf(name, sizeof(name), "byte 0x%02X", static_cast<unsigned char>(byte));
  return name;
}

bool is_blank(std::string_view text) {
  for (;;) {
    text.remove_prefix(std::min(text.find_first_not_of(detail::kAsciiBlank), text.size()));
    if (!text.starts_with("\xC2\xA0")) {
      return text.empty();
    }
    text.remove_prefix(2); // U+00A0: spreadsheets leave it in cells that look empty
  }
}

std::string_view trimmed(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(detail::kAsciiBlank), text.size()));
  return text.substr(0, text.find_last_not_of(detail::kAsciiBlank) + 1);
}

} // namespace hasten
