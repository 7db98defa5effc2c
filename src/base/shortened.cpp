#include "hasten/base/shortened.h"

#include <algorithm>

namespace hasten {

namespace detail {

std::string without_middle(std::string_view text, size_t limit) {
  if (text.size() <= limit) {
    return std::string(text);
  }
  const auto is_within = [&](size_t at) { // inside a UTF-8 character
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  size_t head = limit * 3 / 4;
  size_t tail = text.size() - limit / 4;
  for (int i = 0; i < 3 && head > 0 && is_within(head); ++i) {
    --head;
  }
  for (int i = 0; i < 3 && tail + 1 < text.size() && is_within(tail); ++i) {
    ++tail;
  }
  return std::string(text.substr(0, head)) + "[… " + std::to_string(tail - head) + " bytes …]" +
         std::string(text.substr(tail));
}

} // namespace detail

std::string shortened(std::string_view text, size_t limit) {
  std::string words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    words += detail::without_middle(text.substr(begin, end - begin), 512);
    words.append(text.substr(end, 1));
    begin = end + 1;
  }
  return detail::without_middle(words, limit);
}

} // namespace hasten
