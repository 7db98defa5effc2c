#include "hasten/data/text_classification.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten {

namespace detail {

constexpr const char* kLoadTexts = "data::load_text_classification";

// How many rows of each label go to evaluation: `share` of all rows, spread over
// labels by largest remainder; one at least of each label with two rows or more,
// and never all of them.
std::vector<int64_t> stratified_counts(
    const std::vector<int64_t>& label_rows, double share) {
  const int64_t rows =
      std::accumulate(label_rows.begin(), label_rows.end(), int64_t{0});
  const auto wanted = std::llround(share * static_cast<double>(rows));
  std::vector<int64_t> counts(label_rows.size());
  std::vector<std::pair<double, size_t>> remainders;
  for (size_t label = 0; label < label_rows.size(); ++label) {
    const double exact = share * static_cast<double>(label_rows[label]);
    counts[label] = std::clamp<int64_t>(
        static_cast<int64_t>(exact),
        label_rows[label] >= 2 ? 1 : 0,
        std::max<int64_t>(label_rows[label] - 1, 0));
    remainders.emplace_back(static_cast<double>(counts[label]) - exact, label);
  }
  std::sort(remainders.begin(), remainders.end()); // most underserved first
  int64_t missing =
      wanted - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (const auto& [remainder, label] : remainders) {
    if (missing > 0 && remainder < 0 && counts[label] + 1 < label_rows[label]) {
      ++counts[label];
      --missing;
    }
  }
  return counts;
}

// Whether each row is for evaluation; seeded, by label.
std::vector<char> draw_eval_split(
    const std::vector<int64_t>& labels,
    size_t num_labels,
    double share,
    uint64_t seed) {
  std::vector<std::vector<int64_t>> rows(num_labels); // [label][k]
  for (size_t row = 0; row < labels.size(); ++row) {
    rows[labels[row]].push_back(static_cast<int64_t>(row));
  }
  std::vector<int64_t> sizes;
  for (const auto& of_label : rows) {
    sizes.push_back(static_cast<int64_t>(of_label.size()));
  }
  const auto counts = stratified_counts(sizes, share);
  OrderRng rng(stream_seed("eval_split", seed), 0);
  std::vector<char> for_eval(labels.size(), 0);
  for (size_t label = 0; label < num_labels; ++label) {
    rng.shuffle(rows[label].data(), rows[label].size());
    for (int64_t k = 0; k < counts[label]; ++k) {
      for_eval[rows[label][k]] = 1;
    }
  }
  return for_eval;
}

void add_labelled_row(
    LabelledTexts& side, TextTable& table, int64_t row, int64_t label) {
  side.texts.push_back(std::move(table.texts[row]));
  side.labels.push_back(label);
  side.lines.push_back(table.lines[row]);
  side.path = table.path;
}

// Cuts evaluation rows out of the training file. A drawn row whose text also is
// on the training side stays there.
void split_text_rows(
    TextTable& table,
    const std::vector<int64_t>& labels,
    const TextClassificationOptions& options,
    TextClassificationData& data) {
  auto for_eval = draw_eval_split(
      labels, data.label_names.size(), options.eval_split, options.seed);
  std::unordered_set<std::string_view> train_texts;
  for (int64_t row = 0; row < table.size(); ++row) {
    if (!for_eval[row]) {
      train_texts.insert(table.texts[row]);
    }
  }
  for (int64_t row = 0; row < table.size(); ++row) {
    if (for_eval[row] && train_texts.count(table.texts[row]) > 0) {
      for_eval[row] = 0;
      ++data.report.duplicates;
    }
  }
  train_texts.clear(); // its views do not survive the moves below
  for (int64_t row = 0; row < table.size(); ++row) {
    add_labelled_row(
        for_eval[row] ? data.eval : data.train, table, row, labels[row]);
  }
}

void add_eval_file(
    const TextClassificationOptions& options, TextClassificationData& data) {
  auto table_options = options.table;
  table_options.max_rows = options.max_eval_rows;
  auto table = read_text_table(options.eval_file, table_options);
  const auto labels = label_numbers(
      table,
      data.label_names,
      data.label_names == options.label_names ? "the model"
                                              : "the training data");
  const std::unordered_set<std::string_view> train_texts(
      data.train.texts.begin(), data.train.texts.end());
  for (int64_t row = 0; row < table.size(); ++row) {
    if (train_texts.count(table.texts[row]) > 0) {
      ++data.report.duplicates;
    } else {
      add_labelled_row(data.eval, table, row, labels[row]);
    }
  }
  data.report.rows_read += table.rows_read;
  data.report.filtered_out += table.filtered_out;
  data.report.empty_text += table.empty_text;
  data.report.empty_label += table.empty_label;
}

std::vector<int64_t> counts_by_label(
    const std::vector<int64_t>& labels, size_t num_labels) {
  std::vector<int64_t> counts(num_labels);
  for (const int64_t label : labels) {
    ++counts[label];
  }
  return counts;
}

// What is suspicious about the training rows, in sentences.
std::vector<std::string> label_warnings(const TextClassificationData& data) {
  const auto& counts = data.report.train_counts;
  std::vector<std::string> warnings;
  const auto classes = std::count_if(
      counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
  if (classes == 1) {
    const size_t only = static_cast<size_t>(
        std::max_element(counts.begin(), counts.end()) - counts.begin());
    warnings.push_back(
        "the training data has one class only, label=" +
        data.label_names[only] +
        ": the model cannot learn to tell labels apart");
  }
  return warnings;
}

void check_text_options(const TextClassificationOptions& options) {
  if (!(options.eval_split >= 0 && options.eval_split < 1)) {
    throw InputError(
        kLoadTexts,
        "eval_split=" + std::to_string(options.eval_split),
        "a share of rows, at least 0 and less than 1");
  }
  if (options.table.label_column.empty()) {
    throw InputError(
        kLoadTexts,
        "label_column= is empty",
        "the column that holds the labels",
        "name it with --label-column");
  }
  if (options.eval_split > 0 && !options.eval_file.empty()) {
    throw InputError(
        kLoadTexts,
        "eval_file=" + options.eval_file.string() +
            " together with eval_split=" + std::to_string(options.eval_split),
        "one of the two",
        "leave eval_split out");
  }
}

// "1234 rows: neg 617 (50.0 %), pos 617 (50.0 %)"; the largest shares of many.
std::string label_share_line(
    const std::vector<int64_t>& counts,
    const std::vector<std::string>& label_names) {
  constexpr size_t kShown = 12;
  const int64_t rows =
      std::accumulate(counts.begin(), counts.end(), int64_t{0});
  std::string line = std::to_string(rows) + " rows";
  for (size_t i = 0; i < std::min(counts.size(), kShown); ++i) {
    char share[32];
    std::snprintf(
        share,
        sizeof(share),
        " (%.1f %%)",
        rows == 0 ? 0.0
                  : 100.0 * static_cast<double>(counts[i]) /
                        static_cast<double>(rows));
    line += (i == 0 ? ": " : ", ") + label_names[i] + " " +
            std::to_string(counts[i]) + share;
  }
  if (counts.size() > kShown) {
    line += ", and " + std::to_string(counts.size() - kShown) + " more labels";
  }
  return line;
}

} // namespace detail

std::vector<std::string> TextClassificationReport::lines(
    const std::vector<std::string>& label_names) const {
  std::vector<std::string> text{
      "training data: " + detail::label_share_line(train_counts, label_names)};
  if (std::any_of(eval_counts.begin(), eval_counts.end(), [](int64_t count) {
        return count > 0;
      })) {
    text.push_back(
        "evaluation data: " +
        detail::label_share_line(eval_counts, label_names));
  }
  std::string left_out;
  const auto say = [&](int64_t count, const char* what) {
    if (count > 0) {
      left_out += (left_out.empty() ? "" : ", ") + std::to_string(count) + what;
    }
  };
  say(filtered_out, " by filters");
  say(empty_text, " with empty text");
  say(empty_label, " with empty label");
  say(duplicates, " kept out of evaluation (same text in training)");
  if (!left_out.empty()) {
    text.push_back(
        "of " + std::to_string(rows_read) +
        " rows read, left out: " + left_out);
  }
  return text;
}

TextClassificationData load_text_classification(
    const TextClassificationOptions& options) {
  detail::check_text_options(options);
  auto table_options = options.table;
  table_options.max_rows = options.max_train_rows;
  auto table = read_text_table(options.train_file, table_options);
  TextClassificationData data;
  data.label_names = options.label_names;
  if (data.label_names.empty() ||
      (options.replace_label_names &&
       !knows_labels(data.label_names, table.labels))) {
    data.label_names = distinct_labels(table.labels);
  }
  const auto labels = label_numbers(table, data.label_names, "the model");
  data.report.rows_read = table.rows_read;
  data.report.filtered_out = table.filtered_out;
  data.report.empty_text = table.empty_text;
  data.report.empty_label = table.empty_label;
  if (options.eval_split > 0) {
    detail::split_text_rows(table, labels, options, data);
  } else {
    for (int64_t row = 0; row < table.size(); ++row) {
      detail::add_labelled_row(data.train, table, row, labels[row]);
    }
  }
  if (!options.eval_file.empty()) {
    detail::add_eval_file(options, data);
  }
  const bool evaluates = options.eval_split > 0 || !options.eval_file.empty();
  if (evaluates && data.eval.size() == 0) {
    throw InputError(
        detail::kLoadTexts,
        "no row is left for evaluation: training rows=" +
            std::to_string(data.train.size()) +
            ", rows whose text training has=" +
            std::to_string(data.report.duplicates),
        "at least one row",
        "use more rows, a larger eval_split, or another eval_file");
  }
  data.report.train_counts =
      detail::counts_by_label(data.train.labels, data.label_names.size());
  data.report.eval_counts =
      detail::counts_by_label(data.eval.labels, data.label_names.size());
  data.report.warnings = detail::label_warnings(data);
  return data;
}

} // namespace hasten
