// Lists and numbers as text. Threading: free functions.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

namespace hasten {

/// "a, b, c": joins `parts`.
std::string joined(const std::vector<std::string>& parts, std::string_view between = ", ");
/// The parts between separators, including empty ones. A text without separator is one part.
std::vector<std::string> split(std::string_view text, std::string_view separator = ",");

/// What `f` returns for each element.
template <typename Range, typename F>
auto mapped(const Range& range, const F& f) {
  std::vector<std::decay_t<std::invoke_result_t<const F&, decltype(*range.begin())>>> results;
  for (const auto& element : range) {
    results.push_back(std::invoke(f, element));
  }
  return results;
}

/// The sum of what `f` returns for each element; 0 for none.
template <typename Range, typename F>
auto sum_of(const Range& range, const F& f) {
  std::decay_t<std::invoke_result_t<const F&, decltype(*range.begin())>> sum{};
  for (const auto& element : range) {
    sum += std::invoke(f, element);
  }
  return sum;
}

/// `value` as a field of a CSV file, with quotes if it needs them.
std::string csv_field(std::string_view value, char delimiter = ',');

/// The first `limit` items, then "and 5 more" if there are others.
std::vector<std::string> first_items(std::vector<std::string> items, size_t limit,
                                     const char* more = " more");

/// The number in the text, which must have nothing else. Empty if it is not a number, or out of the
/// type's range.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

/// Cuts words of more than 512 bytes in the middle, then the whole text to `limit` bytes. So a
/// short word after a very long one is kept, for example the name of a line after its value. Never
/// cuts a UTF-8 character. Error calls it for each part of its message, log() for each line.
std::string shortened(std::string_view text, size_t limit = 2048);

/// The columns that the UTF-8 text takes, one for each character.
size_t text_width(std::string_view text);
/// The text for the columns from `indent` on: later lines begin with so many spaces. Breaks lines
/// between words; a longer word, such as a path, stays whole. The text itself if fewer than 20
/// columns are left, and for 0 columns.
std::string wrapped(std::string_view text, int columns, size_t indent);

/// "write NAME" with the name nearest to `word` (nearest_name), or `otherwise` if none is near.
/// For the "Fix" of an error.
std::string write_nearest(std::string_view word, const std::vector<std::string>& names,
                          const std::string& otherwise = {});

/// "%.*f": `digits` digits after the decimal point.
std::string format_fixed(double value, int digits);
/// "%.*g": `digits` significant digits, without trailing zeros.
std::string format_digits(double value, int digits = 6);
/// The shortest decimal number that is read back as the same double.
std::string format_exact(double value);

/// "%016llx": 16 hex digits.
std::string format_hex(uint64_t value);

/// "1:02:03" or "02:03" from seconds; "--:--" if they are not finite.
std::string format_duration(double seconds);
/// "33,530".
std::string format_count(int64_t value);
/// "1.3 GiB".
std::string format_bytes(int64_t bytes);

} // namespace hasten
