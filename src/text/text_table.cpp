// Samples of files, and label numbers.
#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/text/conll.h"
#include "hasten/text/csv.h"
#include "hasten/text/jsonl.h"
#include "hasten/text/text_table.h"
#include "hasten/text/utf8.h"
#include "plain_text.h"

namespace hasten {

namespace detail {

constexpr const char* kTextTable = "data::read_text_table";

bool is_jsonl(const std::filesystem::path& extension) {
  return extension == ".jsonl" || extension == ".ndjson" || extension == ".json";
}

void check_csv_options(const std::filesystem::path& path, const TextTableOptions& options,
                       const std::string& format) {
  if (options.delimiter != '\0' || !options.has_header) {
    throw InputError(
        kTextTable,
        path.string() + " is read as " + format + ": " +
            (options.has_header ? "delimiter=" + byte_name(options.delimiter) : "has_header=false"),
        "no delimiter and has_header=true for " + format,
        "omit the option, or change the file's extension");
  }
}

// Label number of a placeholder: i if `label` is "i" and `names` has "LABEL_i" at i, else -1.
int64_t placeholder_number(const std::string& label, const std::vector<std::string>& names) {
  const int64_t number = parse_number<int64_t>(label).value_or(-1);
  if (number < 0 || number >= static_cast<int64_t>(names.size()) ||
      names[number] != "LABEL_" + label) {
    return -1;
  }
  return number;
}

// "1" for "1.0", else empty: programs that keep a gap in a column as NaN write its whole numbers so.
std::string whole_number(std::string_view label) {
  const bool whole =
      label.ends_with(".0") && parse_number<int64_t>(label.substr(0, label.size() - 2)).has_value();
  return whole ? std::string(label.substr(0, label.size() - 2)) : std::string();
}

std::unique_ptr<RecordReader> open_records(std::shared_ptr<const TextFile> file,
                                           const TextTableOptions& options) {
  if (options.documents && file->extension() == ".txt") {
    check_csv_options(file->path(), options, "plain text");
    return std::make_unique<PlainTextReader>(std::move(file), options.sample_by);
  }
  if (is_jsonl(file->extension())) {
    check_csv_options(file->path(), options, "JSON");
    return std::make_unique<JsonlReader>(std::move(file),
                                         options.problem_type == ProblemType::word_labels);
  }
  if (options.problem_type == ProblemType::word_labels) {
    check_csv_options(file->path(), options, "CoNLL");
    return std::make_unique<ConllReader>(std::move(file));
  }
  return std::make_unique<CsvReader>(std::move(file), CsvOptions{.delimiter = options.delimiter,
                                                                 .has_header = options.has_header});
}

} // namespace detail

TextRowReader::TextRowReader(TextFiles files, const TextTableOptions& options)
    : options_(options), files_(std::move(files)) {
  if (files_.empty()) {
    throw InputError(detail::kTextTable, "files= is empty", "at least one file");
  }
  if (!options.text_pair_column.empty() && options.text_pair_column == options.text_column) {
    throw InputError(detail::kTextTable,
                     "text_pair_column=" + options.text_pair_column + " is the text column",
                     "another column, with the second text");
  }
  open();
}

void TextRowReader::open() {
  records_ = detail::open_records(files_[file_], options_);
  text_column_ = records_->column(options_.text_column, "text_column");
  if (!options_.text_pair_column.empty()) {
    pair_column_ = records_->column(options_.text_pair_column, "text_pair_column");
  }
  label_columns_.clear();
  filters_.clear();
  for (const auto& column : options_.label_columns) {
    label_columns_.push_back(records_->column(column, "label_column"));
  }
  if (label_columns_.empty() && !options_.label_column.empty()) {
    label_columns_.push_back(records_->column(options_.label_column, "label_column"));
  }
  for (const auto& filter : options_.filters) {
    const size_t equals = filter.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw InputError(detail::kTextTable, "filter=" + filter, "column=value",
                       "for example source=imdb");
    }
    filters_.emplace_back(records_->column(filter.substr(0, equals), "filter column"),
                          filter.substr(equals + 1));
  }
}

bool TextRowReader::next_record() {
  while (!records_->next()) {
    if (file_ + 1 == files_.size()) {
      return false;
    }
    before_ += static_cast<int64_t>(files_[file_++]->size());
    open();
  }
  return true;
}

bool TextRowReader::next() {
  const bool needs_label =
      !label_columns_.empty() && options_.problem_type != ProblemType::multi_label;
  while ((options_.max_rows == 0 || passed_ < options_.max_rows) && next_record()) {
    ++counts_.rows_read;
    const bool passes = std::ranges::all_of(filters_, [&](const auto& filter) {
      return records_->field(filter.first) == filter.second;
    });
    text_ = records_->field(text_column_);
    if (!passes) {
      ++counts_.filtered_out;
    } else if (options_.documents && pair_column_ && (is_blank(text_) || is_blank(text_pair()))) {
      throw InputError(detail::kTextTable,
                       position() + ": " +
                           (is_blank(text_) ? options_.text_column : options_.text_pair_column) +
                           " is empty or missing",
                       "a prompt and a completion in each record",
                       "remove the record, or leave it out with a filter");
    } else if (!options_.keep_empty_text &&
               (is_blank(text_) || (pair_column_ && is_blank(text_pair())))) {
      ++counts_.empty_text;
    } else if (needs_label && is_blank(label())) {
      ++counts_.empty_label;
    } else {
      ++passed_;
      return true;
    }
  }
  return false;
}

std::string_view TextRowReader::label(size_t column) const {
  return column < label_columns_.size() ? trimmed(records_->field(label_columns_[column]))
                                        : std::string_view();
}

void TextRowReader::require_rows() const {
  if (passed_ > 0) {
    return;
  }
  throw InputError(
      detail::kTextTable,
      "no sample of " + files_.names() + " is left: records=" + std::to_string(counts_.rows_read) +
          ", left out by filters " + std::to_string(counts_.filtered_out) + ", with empty text " +
          std::to_string(counts_.empty_text) + ", with empty label " +
          std::to_string(counts_.empty_label),
      "at least one sample with a text and a label", "check the columns and the filters");
}

TextTableOptions with_document_columns(const TextFiles& files, TextTableOptions options) {
  if (files.empty()) {
    return options;
  }
  const auto columns = detail::open_records(files[0], options)->columns();
  const auto has = [&](const char* name) {
    return std::ranges::find(columns, name) != columns.end();
  };
  for (const char* chat : {"messages", "conversations"}) {
    if (has(chat) && !has("text") && !has("completion")) {
      throw InputError(
          detail::kTextTable, files[0]->path().string() + " has conversations in column=" + chat,
          "a column text, or prompt and completion",
          "write the conversations as texts first, with the tokenizer's chat template");
    }
  }
  if (has("prompt") && (has("completion") || !has("text"))) {
    options.text_column = "prompt";
    options.text_pair_column = "completion";
  }
  return options;
}

LabelledWords read_labelled_words(const TextRowReader& reader, const TextTableOptions& options) {
  LabelledWords read{.words =
                         read_word_list(reader.text(), reader.position(), options.text_column)};
  if (options.label_column.empty()) {
    return read;
  }
  read.labels = read_word_list(reader.label(), reader.position(), options.label_column);
  if (read.labels.size() != read.words.size()) {
    throw InputError(detail::kTextTable,
                     reader.position() + ": " + options.text_column + " has " +
                         std::to_string(read.words.size()) + " words, but " + options.label_column +
                         " has " + std::to_string(read.labels.size()) + " labels",
                     "one label for each word");
  }
  return read;
}

std::vector<std::string> distinct_labels(const std::vector<std::string>& labels) {
  std::set<std::string> distinct(labels.begin(), labels.end());
  std::erase_if(distinct, [&](const std::string& label) {
    const std::string whole = detail::whole_number(label);
    return !whole.empty() && distinct.contains(whole);
  });
  std::vector<std::pair<int64_t, std::string>> numbered;
  for (const auto& label : distinct) {
    const auto number = parse_number<int64_t>(label);
    if (!number) {
      return {distinct.begin(), distinct.end()};
    }
    numbered.emplace_back(*number, label);
  }
  std::ranges::sort(numbered);
  return mapped(numbered, [](const auto& of) { return of.second; });
}

std::vector<int64_t> label_numbers(const std::vector<std::string>& labels,
                                   const std::vector<std::string>& names) {
  std::unordered_map<std::string, int64_t> numbers;
  for (size_t i = 0; i < names.size(); ++i) {
    numbers.emplace(names[i], static_cast<int64_t>(i));
  }
  std::vector<int64_t> found;
  found.reserve(labels.size());
  for (const auto& label : labels) {
    auto number = numbers.find(label);
    if (number == numbers.end()) {
      const std::string whole = detail::whole_number(label);
      number = numbers.find(whole.empty() ? label + ".0" : whole);
    }
    found.push_back(number != numbers.end() ? number->second
                                            : detail::placeholder_number(label, names));
  }
  return found;
}

} // namespace hasten
