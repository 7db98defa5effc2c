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
    "one JSON object per line, like {\"text\": \"...\", \"label\": \"...\"}";

std::string json_as_text(const nlohmann::json& value) {
  if (value.is_string()) {
    return value.get<std::string>();
  }
  return value.is_null() ? std::string() : value.dump();
}

} // namespace detail

JsonlReader::JsonlReader(std::shared_ptr<const TextFile> file, bool lists)
    : RecordReader(std::move(file)), lists_(lists) {
  const TextWindow start = window_;
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
  next_ = start.file().mark_bytes();
  line_ = 0;
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
      throw InputError(
          detail::kJsonlReader,
          position() + (value == object.end()
                            ? ": the object has no \"" + wanted_[i] + "\""
                            : ": \"" + wanted_[i] + "\" is " + sample(value->dump())),
          "\"" + wanted_[i] + "\" with a text or a number in every line, as in the first line");
    }
    fields_[i] = detail::json_as_text(*value);
  }
  return true;
}

// Finds the next line that is not blank, without its line break.
bool JsonlReader::find_line(std::string_view& line) {
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
