// Rows of one file, and what its labels are called.
#include <algorithm>
#include <charconv>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/data/csv.h"
#include "hasten/data/text_classification.h"
#include "hasten/data/utf8.h"

namespace hasten {

namespace detail {

// "column=value" with its column's number in the file.
struct RowFilter {
  size_t column = 0;
  std::string value{};
};

std::vector<RowFilter> row_filters(
    const CsvReader& reader, const std::vector<std::string>& filters) {
  std::vector<RowFilter> found;
  for (const auto& filter : filters) {
    const size_t equals = filter.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw InputError(
          "data::read_text_table",
          "filter=" + filter,
          "column=value",
          "for example source=imdb");
    }
    found.push_back(
        {reader.column(filter.substr(0, equals), "filter column"),
         filter.substr(equals + 1)});
  }
  return found;
}

[[noreturn]] void fail_no_text_rows(const TextTable& table) {
  throw InputError(
      "data::read_text_table",
      "no row of " + table.path.string() +
          " is left: rows=" + std::to_string(table.rows_read) +
          ", left out by filters " + std::to_string(table.filtered_out) +
          ", empty text " + std::to_string(table.empty_text) +
          ", empty label " + std::to_string(table.empty_label),
      "at least one row with a text and a label",
      "check the columns and the filters");
}

bool parse_label_integer(std::string_view text, int64_t& value) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end;
}

// The number of a label that is not a name: i where the names are the
// placeholders LABEL_0, LABEL_1, … and the label is "i", else -1.
int64_t placeholder_number(
    const std::string& label, const std::vector<std::string>& names) {
  int64_t number = -1;
  if (!parse_label_integer(label, number) || number < 0 ||
      number >= static_cast<int64_t>(names.size()) ||
      names[number] != "LABEL_" + label) {
    return -1;
  }
  return number;
}

std::string joined_labels(
    const std::vector<std::string>& names, size_t limit = 20) {
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

TextTable read_text_table(
    const std::filesystem::path& path, const TextTableOptions& options) {
  CsvReader reader(
      path, {.delimiter = options.delimiter, .has_header = options.has_header});
  const size_t text_column = reader.column(options.text_column, "text_column");
  const bool labelled = !options.label_column.empty();
  const size_t label_column =
      labelled ? reader.column(options.label_column, "label_column") : 0;
  const auto filters = detail::row_filters(reader, options.filters);

  TextTable table{.path = path};
  while ((options.max_rows == 0 || table.size() < options.max_rows) &&
         reader.next()) {
    ++table.rows_read;
    const auto& fields = reader.fields();
    const bool passes = std::all_of(
        filters.begin(), filters.end(), [&](const detail::RowFilter& filter) {
          return fields[filter.column] == filter.value;
        });
    const auto label =
        labelled ? trimmed(fields[label_column]) : std::string_view();
    if (!passes) {
      ++table.filtered_out;
    } else if (is_blank(fields[text_column]) && !options.keep_empty_text) {
      ++table.empty_text;
    } else if (labelled && is_blank(label)) {
      ++table.empty_label;
    } else {
      table.texts.emplace_back(fields[text_column]);
      table.labels.emplace_back(label);
      table.lines.push_back(reader.line());
    }
  }
  if (table.size() == 0) {
    detail::fail_no_text_rows(table);
  }
  return table;
}

std::vector<std::string> distinct_labels(
    const std::vector<std::string>& labels) {
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

bool knows_labels(
    const std::vector<std::string>& names,
    const std::vector<std::string>& labels) {
  const auto distinct = distinct_labels(labels);
  return std::all_of(
      distinct.begin(), distinct.end(), [&](const std::string& label) {
        return std::find(names.begin(), names.end(), label) != names.end() ||
               detail::placeholder_number(label, names) >= 0;
      });
}

std::vector<int64_t> label_numbers(
    const TextTable& table,
    const std::vector<std::string>& names,
    const std::string& owner) {
  std::unordered_map<std::string, int64_t> numbers;
  for (size_t i = 0; i < names.size(); ++i) {
    numbers.emplace(names[i], static_cast<int64_t>(i));
  }
  std::vector<int64_t> found;
  found.reserve(table.labels.size());
  std::vector<std::string> unknown;
  int64_t first_unknown = -1;
  for (int64_t row = 0; row < table.size(); ++row) {
    const auto& label = table.labels[row];
    const auto number = numbers.find(label);
    const int64_t value = number != numbers.end()
                              ? number->second
                              : detail::placeholder_number(label, names);
    found.push_back(value);
    if (value < 0) {
      unknown.push_back(label);
      first_unknown = first_unknown < 0 ? row : first_unknown;
    }
  }
  if (first_unknown >= 0) {
    throw InputError(
        "data::label_numbers",
        table.position(first_unknown) +
            ": label=" + table.labels[first_unknown] + " is unknown to " +
            owner + " (unknown altogether: " +
            detail::joined_labels(distinct_labels(unknown)) + ")",
        "one of: " + detail::joined_labels(names),
        "leave such rows out with a filter, or train with them");
  }
  return found;
}

} // namespace hasten
