#include "hasten/text/jsonl.h"

#include <algorithm>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/text/utf8.h"

namespace hasten {

namespace detail {

constexpr const char* kJsonlReader = "data::JsonlReader";
constexpr const char* kJsonlExpected =
    "one JSON object per line, like {\"text\": \"...\", \"label\": \"...\"}, or one array of them";

bool is_json_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

std::string json_as_text(const nlohmann::json& value) {
  if (value.is_string()) {
    return value.get<std::string>();
  }
  return value.is_null() ? std::string() : value.dump();
}

} // namespace detail

JsonlReader::JsonlReader(std::shared_ptr<const TextFile> file, bool lists)
    : RecordReader(std::move(file)), lists_(lists) {
  size_t first_byte = 0;
  while (detail::is_json_space(byte_at(first_byte))) {
    ++first_byte;
  }
  array_ = byte_at(first_byte) == '[';
  const TextWindow start = window_;
  const size_t start_next = next_;
  std::string_view line;
  if (!find_line(line)) {
    throw InputError(detail::kJsonlReader, "file=" + path().string() + " is empty",
                     detail::kJsonlExpected);
  }
  const nlohmann::json first = parse(line);
  for (const auto& [key, value] : first.items()) {
    columns_.push_back(key);
    samples_.push_back(detail::json_as_text(value));
  }
  window_ = start;
  next_ = start_next;
  line_ = 0;
  next_line_ = 1;
  in_array_ = false;
}

size_t JsonlReader::column(std::string_view name, std::string_view flag) {
  if (std::ranges::find(columns_, name) == columns_.end()) {
    fail_unknown_column(detail::kJsonlReader, std::string(flag) + "=" + std::string(name),
                        samples_);
  }
  const auto found = std::ranges::find(wanted_, name);
  if (found != wanted_.end()) {
    return static_cast<size_t>(found - wanted_.begin());
  }
  wanted_.emplace_back(name);
  fields_.emplace_back();
  return wanted_.size() - 1;
}

bool JsonlReader::next() {
  std::string_view line;
  if (!find_line(line)) {
    return false;
  }
  const nlohmann::json object = parse(line);
  for (size_t i = 0; i < wanted_.size(); ++i) {
    const auto value = object.find(wanted_[i]);
    if (value == object.end() || value->is_object() || (value->is_array() && !lists_)) {
      const bool columns = value != object.end() && value->is_object();
      throw InputError(
          detail::kJsonlReader,
          position() + (value == object.end()
                            ? ": the object has no \"" + wanted_[i] + "\""
                            : ": \"" + wanted_[i] + "\" is " + sample(value->dump())),
          "\"" + wanted_[i] + "\" with a text or a number in every line, as in the first line",
          columns ? "write records: to_json(file, orient='records', lines=True) in pandas" : "");
    }
    fields_[i] = detail::json_as_text(*value);
  }
  return true;
}

// A byte from next_ on; 0 at the end of the file. May move the window.
char JsonlReader::byte_at(size_t offset) {
  while (next_ + offset >= window_.text().size()) {
    if (window_.reaches_end()) {
      return '\0';
    }
    window_.move(std::exchange(next_, 0));
  }
  return window_.text()[next_ + offset];
}

// Finds the next element of the array.
bool JsonlReader::find_element(std::string_view& element) {
  const auto fail = [&](const char* what) {
    throw InputError(detail::kJsonlReader,
                     path().string() + ":" + std::to_string(next_line_) + ": " + what,
                     detail::kJsonlExpected, "correct the file");
  };
  int commas = 0;
  size_t at = 0;
  char c = byte_at(0);
  for (; detail::is_json_space(c) || c == ',' || (c == '[' && !in_array_); c = byte_at(++at)) {
    in_array_ = in_array_ || c == '[';
    commas += c == ',' ? 1 : 0;
    next_line_ += c == '\n' ? 1 : 0;
  }
  if (c == '\0') {
    fail("the array is not closed");
  }
  if (commas != (line_ == 0 || c == ']' ? 0 : 1)) {
    fail("a comma is missing, or there is one too many");
  }
  next_ += at;
  if (c == ']') {
    for (at = 1; detail::is_json_space(c = byte_at(at)); ++at) {
    }
    if (c != '\0') {
      fail("text follows the array");
    }
    return false;
  }
  line_ = next_line_;
  int depth = 0;
  bool quoted = false;
  size_t end = 0;
  do {
    c = byte_at(end++);
    if (c == '\0') {
      fail("the file ends inside of an element");
    }
    next_line_ += c == '\n' ? 1 : 0;
    if (quoted) {
      end += c == '\\' ? 1 : 0;
      quoted = c != '"';
    } else {
      quoted = c == '"';
      depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
    }
  } while (depth > 0 || quoted);
  element = window_.text().substr(next_, end);
  next_ += end;
  return true;
}

// Finds the next line that is not blank, without its line break, or the next element of an array.
bool JsonlReader::find_line(std::string_view& line) {
  if (array_) {
    return find_element(line);
  }
  while (window_.next_line(next_, line)) {
    ++line_;
    if (!trimmed(line).empty()) {
      return true;
    }
  }
  return false;
}

nlohmann::json JsonlReader::parse(std::string_view line) const {
  const auto fail = [&](size_t byte, const std::string& what) {
    throw InputError(
        detail::kJsonlReader,
        position() + ": byte " + std::to_string(byte) + " of the line (byte " +
            std::to_string(window_.begin() +
                           static_cast<size_t>(line.data() - window_.text().data()) + byte) +
            " of the file): " + what,
        detail::kJsonlExpected, "correct the line, or leave it out");
  };
  if (const size_t bad = invalid_utf8_position(line); bad != std::string_view::npos) {
    fail(bad + 1, "invalid UTF-8: " + byte_name(line[bad]));
  }
  ParsedJson parsed = try_parse_json(line);
  if (!parsed.problem.empty()) {
    fail(std::max<size_t>(parsed.byte, 1), parsed.problem);
  }
  nlohmann::json& value = parsed.value;
  if (!value.is_object()) {
    fail(line.find_first_not_of(" \t\r") + 1, "not an object, but " + sample(value.dump()));
  }
  return std::move(value);
}

} // namespace hasten
