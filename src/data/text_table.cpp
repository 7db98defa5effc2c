// Rows of one file, and what its labels are called.
#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/data/csv.h"
#include "hasten/data/jsonl.h"
#include "hasten/data/text_table.h"
#include "hasten/data/utf8.h"

namespace hasten {

namespace detail {

constexpr const char* kTextTable = "data::read_text_table";

bool is_jsonl(const std::filesystem::path& path) {
  const auto extension = path.extension();
  return extension == ".jsonl" || extension == ".ndjson" || extension == ".json";
}

void check_jsonl_options(const std::filesystem::path& path, const TextTableOptions& options) {
  if (options.delimiter != '\0' || !options.has_header) {
    throw InputError(
        kTextTable,
        path.string() + " is read as JSON lines: " +
            (options.has_header ? "delimiter=" + byte_name(options.delimiter) : "has_header=false"),
        "neither for JSON lines, which name their columns in each line",
        "leave it out, or give the file another ending");
  }
}

bool parse_label_integer(std::string_view text, int64_t& value) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end;
}

// The number of a label that is not a name: i where the names are the
// placeholders LABEL_0, LABEL_1, … and the label is "i", else -1.
int64_t placeholder_number(const std::string& label, const std::vector<std::string>& names) {
  int64_t number = -1;
  if (!parse_label_integer(label, number) || number < 0 ||
      number >= static_cast<int64_t>(names.size()) || names[number] != "LABEL_" + label) {
    return -1;
  }
  return number;
}

std::string joined_labels(const std::vector<std::string>& names, size_t limit = 20) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), limit); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > limit) {
    text += ", and " + std::to_string(names.size() - limit) + " more";
  }
  return text;
}

} // namespace detail

std::string TextTable::position(int64_t row) const {
  return path.string() + ":" + std::to_string(lines.at(row));
}

// One of the two kinds of file.
struct TextRowReader::Format {
  std::optional<CsvReader> csv{};
  std::optional<JsonlReader> jsonl{};
  std::shared_ptr<const TextFile> file;

  Format(std::shared_ptr<const TextFile> opened, const TextTableOptions& options)
      : file(std::move(opened)) {
    if (detail::is_jsonl(file->path())) {
      detail::check_jsonl_options(file->path(), options);
      jsonl.emplace(file);
    } else {
      csv.emplace(file,
                  CsvOptions{.delimiter = options.delimiter, .has_header = options.has_header});
    }
  }

  size_t column(const std::string& name, const char* flag) {
    return csv ? csv->column(name, flag) : jsonl->column(name, flag);
  }
  bool next() { return csv ? csv->next() : jsonl->next(); }
  std::string_view field(size_t column) const {
    return csv ? csv->fields()[column] : jsonl->field(column);
  }
};

TextRowReader::TextRowReader(std::shared_ptr<const TextFile> file, const TextTableOptions& options)
    : options_(options),
      format_(std::make_unique<Format>(std::move(file), options)),
      text_column_(format_->column(options.text_column, "text_column")),
      label_column_(options.label_column.empty()
                        ? 0
                        : format_->column(options.label_column, "label_column")) {
  for (const auto& filter : options.filters) {
    const size_t equals = filter.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw InputError(detail::kTextTable, "filter=" + filter, "column=value",
                       "for example source=imdb");
    }
    filters_.emplace_back(format_->column(filter.substr(0, equals), "filter column"),
                          filter.substr(equals + 1));
  }
}

TextRowReader::~TextRowReader() = default;
TextRowReader::TextRowReader(TextRowReader&&) noexcept = default;

bool TextRowReader::next() {
  const bool labelled = !options_.label_column.empty();
  while ((options_.max_rows == 0 || passed_ < options_.max_rows) && format_->next()) {
    ++counts_.rows_read;
    const bool passes = std::all_of(filters_.begin(), filters_.end(), [&](const auto& filter) {
      return format_->field(filter.first) == filter.second;
    });
    text_ = format_->field(text_column_);
    label_ = labelled ? trimmed(format_->field(label_column_)) : std::string_view();
    if (!passes) {
      ++counts_.filtered_out;
    } else if (is_blank(text_) && !options_.keep_empty_text) {
      ++counts_.empty_text;
    } else if (labelled && is_blank(label_)) {
      ++counts_.empty_label;
    } else {
      ++passed_;
      return true;
    }
  }
  return false;
}

int64_t TextRowReader::line() const {
  return format_->csv ? format_->csv->line() : format_->jsonl->line();
}

std::string TextRowReader::position() const {
  return format_->csv ? format_->csv->position() : format_->jsonl->position();
}

int64_t TextRowReader::bytes_read() const {
  return static_cast<int64_t>(format_->csv ? format_->csv->bytes_read()
                                           : format_->jsonl->bytes_read());
}

void TextRowReader::require_rows() const {
  if (passed_ > 0) {
    return;
  }
  throw InputError(detail::kTextTable,
                   "no row of " + format_->file->path().string() +
                       " is left: rows=" + std::to_string(counts_.rows_read) +
                       ", left out by filters " + std::to_string(counts_.filtered_out) +
                       ", empty text " + std::to_string(counts_.empty_text) + ", empty label " +
                       std::to_string(counts_.empty_label),
                   "at least one row with a text and a label", "check the columns and the filters");
}

TextTable read_text_table(const std::filesystem::path& path, const TextTableOptions& options) {
  TextRowReader reader(TextFile::open(path, detail::kTextTable), options);
  TextTable table;
  table.path = path;
  while (reader.next()) {
    table.texts.emplace_back(reader.text());
    table.labels.emplace_back(reader.label());
    table.lines.push_back(reader.line());
  }
  reader.require_rows();
  static_cast<TextRowCounts&>(table) = reader.counts();
  return table;
}

std::vector<std::string> distinct_labels(const std::vector<std::string>& labels) {
  const std::set<std::string> distinct(labels.begin(), labels.end());
  std::vector<std::pair<int64_t, std::string>> numbered;
  for (const auto& label : distinct) {
    int64_t number = 0;
    if (!detail::parse_label_integer(label, number)) {
      return {distinct.begin(), distinct.end()};
    }
    numbered.emplace_back(number, label);
  }
  std::sort(numbered.begin(), numbered.end());
  std::vector<std::string> names;
  for (auto& [number, label] : numbered) {
    names.push_back(std::move(label));
  }
  return names;
}

namespace detail {

void fail_unknown_label(const std::string& position, const std::string& label,
                        const std::vector<std::string>& all_unknown,
                        const std::vector<std::string>& names, const std::string& owner) {
  throw InputError("data::label_numbers",
                   position + ": label=" + label + " is unknown to " + owner +
                       " (unknown altogether: " + joined_labels(distinct_labels(all_unknown)) + ")",
                   "one of: " + joined_labels(names),
                   "leave such rows out with a filter, or train with them");
}

std::vector<int64_t> numbers_of_labels(const std::vector<std::string>& labels,
                                       const std::vector<std::string>& names) {
  std::unordered_map<std::string, int64_t> numbers;
  for (size_t i = 0; i < names.size(); ++i) {
    numbers.emplace(names[i], static_cast<int64_t>(i));
  }
  std::vector<int64_t> found;
  found.reserve(labels.size());
  for (const auto& label : labels) {
    const auto number = numbers.find(label);
    found.push_back(number != numbers.end() ? number->second : placeholder_number(label, names));
  }
  return found;
}

} // namespace detail

bool knows_labels(const std::vector<std::string>& names, const std::vector<std::string>& labels) {
  const auto numbers = detail::numbers_of_labels(distinct_labels(labels), names);
  return std::find(numbers.begin(), numbers.end(), -1) == numbers.end();
}

std::vector<int64_t> label_numbers(const TextTable& table, const std::vector<std::string>& names,
                                   const std::string& owner) {
  auto found = detail::numbers_of_labels(table.labels, names);
  std::vector<std::string> unknown;
  int64_t first_unknown = -1;
  for (int64_t row = 0; row < table.size(); ++row) {
    if (found[row] < 0) {
      unknown.push_back(table.labels[row]);
      first_unknown = first_unknown < 0 ? row : first_unknown;
    }
  }
  if (first_unknown >= 0) {
    detail::fail_unknown_label(table.position(first_unknown), table.labels[first_unknown], unknown,
                               names, owner);
  }
  return found;
}

} // namespace hasten
