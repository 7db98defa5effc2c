// Lists and numbers in messages and reports. Threading: free functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hasten {

/// "a, b, c".
std::string joined(const std::vector<std::string>& parts, std::string_view between = ", ");
/// The parts between separators, empty ones too; one part of a text without any.
std::vector<std::string> split(std::string_view text, std::string_view separator = ",");

/// "write NAME" with the name nearest to `word` (nearest_name); `otherwise` where none is
/// near. For the "Fix" of an error.
std::string write_nearest(std::string_view word, const std::vector<std::string>& names,
                          const std::string& otherwise = {});

/// "%.*f": so many digits behind the point.
std::string format_fixed(double value, int digits);
/// "%.*g": so many digits in all, fewer where they say the same.
std::string format_digits(double value, int digits = 6);
/// The shortest decimal that reads back as the same number.
std::string format_exact(double value);

/// "1:02:03" or "02:03" from seconds; "--:--" where it is not finite.
std::string format_duration(double seconds);
/// "33,530".
std::string format_count(int64_t value);
/// "1.3 GiB".
std::string format_bytes(int64_t bytes);

} // namespace hasten
