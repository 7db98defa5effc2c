#include "hasten/data/text_targets.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

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
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    std::string part = text.substr(at, end - at);
    part.erase(0, part.find_first_not_of(" \t"));
    part.erase(part.find_last_not_of(" \t") + 1);
    if (!part.empty()) {
      parts.push_back(std::move(part));
    }
    at = end + separator.size();
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
      std::string known;
      for (const std::string& each : names) {
        known += (known.empty() ? "one of " : ", ") + each;
      }
      refuse_label(path, line, read.columns[0], name, known);
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
  std::vector<int64_t> order(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  OrderRng rng(stream_seed("eval_split", options.seed), 0);
  rng.shuffle(order.data(), order.size());
  const auto wanted =
      std::clamp<int64_t>(std::llround(options.eval_split * static_cast<double>(rows)),
                          rows >= 2 ? 1 : 0, std::max<int64_t>(rows - 1, 0));
  std::vector<char> for_eval(static_cast<size_t>(rows), 0);
  for (int64_t i = 0; i < wanted; ++i) {
    for_eval[static_cast<size_t>(order[static_cast<size_t>(i)])] = 1;
  }
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

std::string side_line(const char* what, const TargetTexts& side, const TextTargets& data) {
  std::string line = std::string(what) + ": " + std::to_string(side.size()) + " rows";
  const int64_t targets = data.targets_per_row();
  char text[96];
  if (data.regression) {
    const auto [least, most] = std::minmax_element(side.targets.begin(), side.targets.end());
    const double mean = std::accumulate(side.targets.begin(), side.targets.end(), 0.0) /
                        static_cast<double>(side.size());
    std::snprintf(text, sizeof text, " from %.4g to %.4g, mean %.4g", *least, *most, mean);
    return line + ", " + data.label_names[0] + text;
  }
  for (int64_t label = 0; label < std::min<int64_t>(targets, 12); ++label) {
    int64_t count = 0;
    for (int64_t row = 0; row < side.size(); ++row) {
      count += side.targets[static_cast<size_t>(row * targets + label)] > 0;
    }
    std::snprintf(text, sizeof text, " %lld (%.1f %%)", static_cast<long long>(count),
                  100.0 * static_cast<double>(count) / static_cast<double>(side.size()));
    line += (label == 0 ? ": " : ", ") + data.label_names[static_cast<size_t>(label)] + text;
  }
  return targets > 12 ? line + ", and " + std::to_string(targets - 12) + " more labels" : line;
}

} // namespace detail

std::vector<std::string> TextTargets::lines() const {
  std::vector<std::string> text{detail::side_line("training data", train, *this)};
  if (eval.size() > 0) {
    text.push_back(detail::side_line("evaluation data", eval, *this));
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
