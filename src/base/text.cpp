#include "hasten/base/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "hasten/base/error.h"

namespace hasten {

std::string joined(const std::vector<std::string>& parts, std::string_view between) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    text.append(i == 0 ? std::string_view() : between).append(parts[i]);
  }
  return text;
}

std::vector<std::string> split(std::string_view text, std::string_view separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.emplace_back(text.substr(at, end - at));
    at = end + separator.size();
  }
  return parts;
}

std::string csv_field(std::string_view value, char delimiter) {
  const std::string special{'"', '\n', '\r', delimiter};
  const bool plain = !value.starts_with(' ') && !value.ends_with(' ') &&
                     value.find_first_of(special) == std::string_view::npos;
  return plain ? std::string(value) : "\"" + joined(split(value, "\""), "\"\"") + "\"";
}

std::vector<std::string> first_items(std::vector<std::string> items, size_t limit,
                                     const char* more) {
  if (items.size() > limit) {
    const size_t others = items.size() - limit;
    items.resize(limit);
    items.push_back("and " + std::to_string(others) + more);
  }
  return items;
}

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

size_t text_width(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string wrapped(std::string_view text, int columns, size_t indent) {
  const auto most = static_cast<size_t>(columns);
  if (most < indent + 20) {
    return std::string(text);
  }
  const std::vector<std::string> words = split(text, " ");
  std::string lines = words[0];
  size_t used = indent + text_width(words[0]);
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t width = text_width(words[i]);
    if (used + 1 + width > most) {
      lines += "\n" + std::string(indent, ' ');
      used = indent + width;
    } else {
      lines += ' ';
      used += 1 + width;
    }
    lines += words[i];
  }
  return lines;
}

std::string write_nearest(std::string_view word, const std::vector<std::string>& names,
                          const std::string& otherwise) {
  const std::string near = nearest_name(word, names);
  return near.empty() ? otherwise : "write " + near;
}

std::string format_fixed(double value, int digits) {
  std::array<char, 400> text{}; // the largest double has 309 digits
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string format_digits(double value, int digits) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.*g", digits, value);
  return text.data();
}

std::string format_exact(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

std::string format_hex(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e12) {
    return "--:--";
  }
  const auto whole = static_cast<long long>(std::llround(seconds));
  char text[40];
  if (whole >= 3600) {
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60,
                  whole % 60);
  } else {
    std::snprintf(text, sizeof text, "%02lld:%02lld", whole / 60, whole % 60);
  }
  return text;
}

std::string format_count(int64_t value) {
  std::string text = std::to_string(value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t end = text.size(); end > first + 3; end -= 3) {
    text.insert(end - 3, ",");
  }
  return text;
}

std::string format_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return format_fixed(value, unit == 0 || std::abs(value) >= 100 ? 0 : 1) + " " + kUnits[unit];
}

} // namespace hasten
