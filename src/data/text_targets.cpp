#include "hasten/data/text_targets.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

constexpr const char* kTextTargets = "data::load_text_targets";

bool is_regression(const TextTargetsOptions& options) {
  return options.label_columns.empty() && options.label_separator.empty();
}

[[noreturn]] void refuse_label(const std::filesystem::path& path, int64_t line,
                               const std::string& column, const std::string& label,
                               const std::string& expected) {
  throw InputError(kTextTargets,
                   path.string() + ":" + std::to_string(line) + ": " + column + "=" + label,
                   expected);
}

/// A column's labels by the line at which their row starts; rows without one are not
/// there.
std::unordered_map<int64_t, std::string> labels_by_line(const std::filesystem::path& path,
                                                        const TextTargetsOptions& options,
                                                        const std::string& column) {
  TextTableOptions table = options.table;
  table.label_column = column;
  table.max_rows = 0;
  TextTable read = read_text_table(path, table);
  std::unordered_map<int64_t, std::string> labels;
  for (size_t row = 0; row < read.labels.size(); ++row) {
    labels.emplace(read.lines[row], std::move(read.labels[row]));
  }
  return labels;
}

/// The parts of "a|b", trimmed of spaces; none of an empty text.
std::vector<std::string> split_label(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  for (std::string& part : split(text, separator)) {
    part.erase(0, part.find_first_not_of(" \t"));
    part.erase(part.find_last_not_of(" \t") + 1);
    if (!part.empty()) {
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

float read_real(const std::filesystem::path& path, int64_t line, const std::string& column,
                const std::string& text) {
  float value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || !std::isfinite(value)) {
    refuse_label(path, line, column, text, "a finite number");
  }
  return value;
}

float read_flag_label(const std::filesystem::path& path, int64_t line, const std::string& column,
                      const std::string& text) {
  for (const char* yes : {"1", "1.0", "true", "True"}) {
    if (text == yes) {
      return 1;
    }
  }
  for (const char* no : {"0", "0.0", "false", "False"}) {
    if (text == no) {
      return 0;
    }
  }
  refuse_label(path, line, column, text, "0 or 1");
}

/// Rows and what their labels say, in the words of the file.
struct LabelledLines {
  TextTable table{}; // texts and lines; labels are empty
  std::vector<std::unordered_map<int64_t, std::string>> labels{}; // [column]
  std::vector<std::string> columns{};
};

LabelledLines read_labelled_lines(const std::filesystem::path& path,
                                  const TextTargetsOptions& options) {
  LabelledLines read;
  read.columns = options.label_columns.empty()
                     ? std::vector<std::string>{options.table.label_column}
                     : options.label_columns;
  for (const std::string& column : read.columns) {
    read.labels.push_back(labels_by_line(path, options, column));
  }
  TextTableOptions table = options.table;
  table.label_column.clear();
  table.max_rows = 0;
  read.table = read_text_table(path, table);
  return read;
}

std::vector<std::string> names_in(const LabelledLines& read, const std::string& separator) {
  std::set<std::string> names;
  for (const auto& [line, text] : read.labels[0]) {
    for (std::string& name : split_label(text, separator)) {
      names.insert(std::move(name));
    }
  }
  return distinct_labels({names.begin(), names.end()});
}

/// The row's targets into `row`; false where it has no label and must have one.
bool read_targets(const LabelledLines& read, int64_t line, const TextTargetsOptions& options,
                  const std::vector<std::string>& names, std::vector<float>& row) {
  const auto& path = read.table.path;
  row.assign(names.size(), 0.0f);
  if (!options.label_columns.empty()) {
    for (size_t i = 0; i < read.columns.size(); ++i) {
      const auto label = read.labels[i].find(line);
      row[i] = read_flag_label(path, line, read.columns[i],
                               label == read.labels[i].end() ? std::string() : label->second);
    }
    return true;
  }
  const auto label = read.labels[0].find(line);
  if (label == read.labels[0].end()) {
    return !options.label_separator.empty(); // none of the labels
  }
  if (options.label_separator.empty()) {
    row[0] = read_real(path, line, read.columns[0], label->second);
    return true;
  }
  for (const std::string& name : split_label(label->second, options.label_separator)) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      refuse_label(path, line, read.columns[0], name, "one of " + joined(names));
    }
    row[static_cast<size_t>(found - names.begin())] = 1;
  }
  return true;
}

TargetTexts targets_of(LabelledLines& read, const TextTargetsOptions& options,
                       const std::vector<std::string>& names, int64_t max_rows) {
  TargetTexts texts;
  std::vector<float> row;
  for (size_t i = 0; i < read.table.texts.size(); ++i) {
    if (max_rows > 0 && texts.size() >= max_rows) {
      break;
    }
    if (!read_targets(read, read.table.lines[i], options, names, row)) {
      ++read.table.empty_label;
      continue;
    }
    texts.texts.push_back(std::move(read.table.texts[i]));
    texts.lines.push_back(read.table.lines[i]);
    texts.targets.insert(texts.targets.end(), row.begin(), row.end());
  }
  if (texts.size() == 0) {
    throw InputError(
        kTextTargets,
        "no row of " + read.table.path.string() + " has a label in column=" + read.columns[0],
        "at least one row with a text and a label");
  }
  return texts;
}

void append_row(TargetTexts& side, TargetTexts& all, int64_t row, int64_t targets) {
  const auto at = static_cast<size_t>(row);
  side.texts.push_back(std::move(all.texts[at]));
  side.lines.push_back(all.lines[at]);
  const auto first = all.targets.begin() + row * targets;
  side.targets.insert(side.targets.end(), first, first + targets);
}

/// Draws the rows of evaluation; a text that training has too stays in training.
void split_targets(TargetTexts all, const TextTargetsOptions& options, TextTargets& data) {
  const int64_t rows = all.size();
  std::vector<char> for_eval = draw_eval_split(std::vector<int32_t>(static_cast<size_t>(rows)), 1,
                                               options.eval_split, options.seed);
  std::unordered_set<std::string> train_texts;
  for (size_t row = 0; row < for_eval.size(); ++row) {
    if (!for_eval[row]) {
      train_texts.insert(all.texts[row]);
    }
  }
  for (size_t row = 0; row < for_eval.size(); ++row) {
    if (for_eval[row] && train_texts.count(all.texts[row]) > 0) {
      for_eval[row] = 0;
      ++data.duplicates;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    append_row(for_eval[static_cast<size_t>(row)] ? data.eval : data.train, all, row,
               data.targets_per_row());
  }
}

void add_eval_targets(const TextTargetsOptions& options, TextTargets& data) {
  TextTargetsOptions eval = options;
  eval.max_train_rows = options.max_eval_rows;
  TargetTexts all = read_text_targets(options.eval_file, eval, data.label_names);
  const std::unordered_set<std::string> train_texts(data.train.texts.begin(),
                                                    data.train.texts.end());
  for (int64_t row = 0; row < all.size(); ++row) {
    if (train_texts.count(all.texts[static_cast<size_t>(row)]) > 0) {
      ++data.duplicates;
    } else {
      append_row(data.eval, all, row, data.targets_per_row());
    }
  }
}

std::string side_line(const TargetTexts& side, const TextTargets& data) {
  const auto targets = static_cast<size_t>(data.targets_per_row());
  if (data.regression) {
    const auto [least, most] = std::minmax_element(side.targets.begin(), side.targets.end());
    const double mean = std::accumulate(side.targets.begin(), side.targets.end(), 0.0) /
                        static_cast<double>(side.size());
    return std::to_string(side.size()) + " rows, " + data.label_names[0] + " from " +
           format_digits(*least, 4) + " to " + format_digits(*most, 4) + ", mean " +
           format_digits(mean, 4);
  }
  std::vector<int64_t> counts(targets);
  for (size_t i = 0; i < side.targets.size(); ++i) {
    counts[i % targets] += side.targets[i] > 0;
  }
  return label_share_line(side.size(), counts, data.label_names);
}

} // namespace detail

std::vector<std::string> TextTargets::lines() const {
  std::vector<std::string> text{"training data: " + detail::side_line(train, *this)};
  if (eval.size() > 0) {
    text.push_back("evaluation data: " + detail::side_line(eval, *this));
  }
  if (left_out + duplicates > 0) {
    text.push_back("left out: " + std::to_string(left_out) +
                   " rows without text or value or by filters, kept out of evaluation "
                   "(same text in training): " +
                   std::to_string(duplicates));
  }
  return text;
}

TargetTexts read_text_targets(const std::filesystem::path& path, const TextTargetsOptions& options,
                              const std::vector<std::string>& label_names) {
  auto read = detail::read_labelled_lines(path, options);
  return detail::targets_of(read, options, label_names, options.max_train_rows);
}

TextTargets load_text_targets(const TextTargetsOptions& options) {
  if (!(options.eval_split >= 0 && options.eval_split < 1) ||
      (options.eval_split > 0 && !options.eval_file.empty())) {
    throw InputError(detail::kTextTargets,
                     "eval_split=" + std::to_string(options.eval_split) +
                         ", eval_file=" + options.eval_file.string(),
                     "one of the two, the split at least 0 and less than 1");
  }
  TextTargets data;
  data.regression = detail::is_regression(options);
  auto read = detail::read_labelled_lines(options.train_file, options);
  data.label_names = !options.label_columns.empty() ? options.label_columns
                     : data.regression ? std::vector<std::string>{options.table.label_column}
                     : !options.label_names.empty()
                         ? options.label_names
                         : detail::names_in(read, options.label_separator);
  TargetTexts all = detail::targets_of(read, options, data.label_names, options.max_train_rows);
  data.left_out = read.table.filtered_out + read.table.empty_text + read.table.empty_label;
  if (options.eval_split > 0) {
    detail::split_targets(std::move(all), options, data);
  } else {
    data.train = std::move(all);
  }
  if (!options.eval_file.empty()) {
    detail::add_eval_targets(options, data);
  }
  if ((options.eval_split > 0 || !options.eval_file.empty()) && data.eval.size() == 0) {
    throw InputError(
        detail::kTextTargets,
        "no row is left for evaluation: training rows=" + std::to_string(data.train.size()) +
            ", rows whose text training has=" + std::to_string(data.duplicates),
        "at least one row", "use more rows, a larger eval_split, or another eval_file");
  }
  return data;
}

TargetDataset::TargetDataset(std::shared_ptr<const Dataset> rows, std::vector<float> targets,
                             int64_t targets_per_row, bool squeeze)
    : rows_(std::move(rows)),
      targets_(std::move(targets)),
      targets_per_row_(targets_per_row),
      squeeze_(squeeze && targets_per_row == 1) {
  if (targets_per_row < 1 ||
      static_cast<int64_t>(targets_.size()) != rows_->size() * targets_per_row) {
    throw InputError(
        "data::TargetDataset",
        "targets=" + std::to_string(targets_.size()) + " for rows=" + std::to_string(rows_->size()),
        std::to_string(targets_per_row) + " a row");
  }
}

Batch TargetDataset::collate(const std::vector<int64_t>& indices) const {
  Batch batch = rows_->collate(indices);
  const auto count = static_cast<int64_t>(indices.size());
  const at::Tensor labels = at::empty({count, targets_per_row_}, at::TensorOptions(at::kFloat));
  auto* out = labels.mutable_data_ptr<float>();
  for (const int64_t row : indices) {
    out = std::copy_n(targets_.begin() + row * targets_per_row_, targets_per_row_, out);
  }
  batch.tensors.insert_or_assign("labels", squeeze_ ? labels.view({count}) : labels);
  return batch;
}

} // namespace hasten
