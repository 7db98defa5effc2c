#include "hasten/text/conll.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/text/utf8.h"

namespace hasten {

namespace detail {

constexpr const char* kConllReader = "data::ConllReader";

} // namespace detail

ConllReader::ConllReader(std::shared_ptr<const TextFile> file) : RecordReader(std::move(file)) {
  const TextWindow start = window_;
  const size_t first = next_;
  std::vector<std::string_view> word;
  while (word.empty() && !at_end_) {
    word = next_word();
  }
  if (word.empty()) {
    throw InputError(detail::kConllReader, "file=" + path().string() + " has no sentence",
                     "lines with a word and its tag");
  }
  for (size_t i = 0; i < word.size(); ++i) {
    columns_.push_back(i == 0 ? "tokens" : i + 1 == word.size() ? "ner_tags" : std::to_string(i));
    samples_.emplace_back(word[i]);
  }
  fields_.resize(word.size());
  window_ = start;
  next_ = first;
  line_ = last_line_ = 0;
  at_end_ = false;
}

size_t ConllReader::column(std::string_view name, std::string_view flag) {
  const auto found = std::ranges::find(columns_, name);
  if (found == columns_.end()) {
    fail_unknown_column(detail::kConllReader, std::string(flag) + "=" + std::string(name),
                        samples_);
  }
  return static_cast<size_t>(found - columns_.begin());
}

bool ConllReader::next() {
  std::vector<nlohmann::json> lists(columns_.size(), nlohmann::json::array());
  int64_t first_line = 0;
  while (!at_end_) {
    const auto word = next_word();
    if (word.empty()) {
      if (first_line > 0) {
        break;
      }
      continue;
    }
    first_line = first_line == 0 ? line_ : first_line;
    if (word.size() != columns_.size()) {
      throw InputError(detail::kConllReader,
                       position() + " has columns=" + std::to_string(word.size()),
                       std::to_string(columns_.size()) + ", as the first line");
    }
    for (size_t i = 0; i < word.size(); ++i) {
      lists[i].push_back(word[i]);
    }
  }
  if (first_line == 0) {
    return false;
  }
  line_ = first_line;
  std::ranges::transform(lists, fields_.begin(), [](const auto& list) { return list.dump(); });
  return true;
}

std::vector<std::string_view> ConllReader::next_word() {
  std::string_view line;
  while (window_.next_line(next_, line)) {
    ++last_line_;
    line_ = last_line_;
    if (const size_t bad = invalid_utf8_position(line); bad != std::string_view::npos) {
      throw InputError(detail::kConllReader,
                       position() + ": byte " + std::to_string(bad + 1) +
                           " of the line: invalid UTF-8: " + byte_name(line[bad]),
                       "UTF-8", "convert the file");
    }
    if (line.starts_with("-DOCSTART-")) {
      continue;
    }
    const std::string_view between = line.find('\t') == std::string_view::npos ? " \r" : "\t\r";
    std::vector<std::string_view> word;
    for (size_t at = 0; (at = line.find_first_not_of(between, at)) != std::string_view::npos;) {
      const size_t end = std::min(line.find_first_of(between, at), line.size());
      word.push_back(line.substr(at, end - at));
      at = end;
    }
    return word;
  }
  at_end_ = true;
  return {};
}

std::vector<std::string> read_word_list(std::string_view json, const std::string& position,
                                        const std::string& column) {
  const auto refuse = [&](const std::string& value) {
    throw InputError("data::read_word_list", position + ": " + column + "=" + value.substr(0, 40),
                     "a list of texts or whole numbers, such as [\"EU\", \"rejects\"]");
  };
  const ParsedJson parsed = try_parse_json(json);
  if (!parsed.problem.empty() || !parsed.value.is_array()) {
    refuse(std::string(json));
  }
  std::vector<std::string> words;
  for (const nlohmann::json& value : parsed.value) {
    if (!value.is_string() && !value.is_number_integer()) {
      refuse(value.dump());
    }
    words.push_back(value.is_string() ? value.get<std::string>() : value.dump());
  }
  return words;
}

} // namespace hasten
