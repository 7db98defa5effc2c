#include "hasten/data/text_classification.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/random.h"

namespace hasten {

namespace detail {

constexpr const char* kLoadTexts = "data::load_text_classification";

// How many rows of each label go to evaluation: `share` of all rows, spread over
// labels by largest remainder; one at least of each label with two rows or more,
// and never all of them.
std::vector<int64_t> stratified_counts(const std::vector<int64_t>& label_rows, double share) {
  const int64_t rows = std::accumulate(label_rows.begin(), label_rows.end(), int64_t{0});
  const auto wanted = std::llround(share * static_cast<double>(rows));
  std::vector<int64_t> counts(label_rows.size());
  std::vector<std::pair<double, size_t>> remainders;
  for (size_t label = 0; label < label_rows.size(); ++label) {
    const double exact = share * static_cast<double>(label_rows[label]);
    counts[label] = std::clamp<int64_t>(static_cast<int64_t>(exact), label_rows[label] >= 2 ? 1 : 0,
                                        std::max<int64_t>(label_rows[label] - 1, 0));
    remainders.emplace_back(static_cast<double>(counts[label]) - exact, label);
  }
  std::sort(remainders.begin(), remainders.end()); // most underserved first
  int64_t missing = wanted - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (const auto& [remainder, label] : remainders) {
    if (missing > 0 && remainder < 0 && counts[label] + 1 < label_rows[label]) {
      ++counts[label];
      --missing;
    }
  }
  return counts;
}

std::vector<char> draw_eval_split(const std::vector<int32_t>& labels, size_t num_labels,
                                  double share, uint64_t seed) {
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

using TextHash = std::pair<uint64_t, uint64_t>;

TextHash hash_text(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return {hash.high64, hash.low64};
}

// One pass over a file: labels as numbers in order of appearance.
struct ScannedRows {
  std::vector<int32_t> labels{}; // [row]
  std::vector<TextHash> hashes{}; // [row], where they are asked for
  std::vector<std::string> names{}; // [label]
  std::vector<std::string> positions{}; // where a label came first [label]
};

ScannedRows scan_rows(TextRowReader& reader, bool with_hashes) {
  ScannedRows rows;
  std::unordered_map<std::string, int32_t> numbers;
  std::string label;
  while (reader.next()) {
    label = reader.label();
    const auto [entry, fresh] = numbers.emplace(label, static_cast<int32_t>(rows.names.size()));
    if (fresh) {
      rows.names.push_back(label);
      rows.positions.push_back(reader.position());
    }
    rows.labels.push_back(entry->second);
    if (with_hashes) {
      rows.hashes.push_back(hash_text(reader.text()));
    }
  }
  reader.require_rows();
  return rows;
}

// Replaces numbers in order of appearance by those of `names`.
void number_labels(ScannedRows& rows, const std::vector<std::string>& names,
                   const std::string& owner) {
  const auto numbers = numbers_of_labels(rows.names, names);
  std::vector<std::string> unknown;
  size_t first = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < 0) {
      first = unknown.empty() ? i : first;
      unknown.push_back(rows.names[i]);
    }
  }
  if (!unknown.empty()) {
    fail_unknown_label(rows.positions[first], rows.names[first], unknown, names, owner);
  }
  for (int32_t& label : rows.labels) {
    label = static_cast<int32_t>(numbers[label]);
  }
}

void add_counts(const TextRowCounts& counts, TextClassificationReport& report) {
  report.rows_read += counts.rows_read;
  report.filtered_out += counts.filtered_out;
  report.empty_text += counts.empty_text;
  report.empty_label += counts.empty_label;
}

// Hashes of the training side, sorted.
std::vector<TextHash> training_hashes(const TextSelection& selection,
                                      const std::vector<TextHash>& hashes) {
  std::vector<TextHash> sorted;
  for (size_t row = 0; row < hashes.size(); ++row) {
    if (!selection.for_eval[row]) {
      sorted.push_back(hashes[row]);
    }
  }
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

// A drawn row whose text also is on the training side stays there.
void split_rows(const std::vector<TextHash>& hashes, const TextClassificationOptions& options,
                TextSelection& selection) {
  selection.for_eval = draw_eval_split(selection.train_labels, selection.label_names.size(),
                                       options.eval_split, options.seed);
  const auto train = training_hashes(selection, hashes);
  for (size_t row = 0; row < hashes.size(); ++row) {
    if (selection.for_eval[row] && std::binary_search(train.begin(), train.end(), hashes[row])) {
      selection.for_eval[row] = 0;
      ++selection.report.duplicates;
    }
  }
}

void add_eval_rows(const std::vector<TextHash>& train_hashes,
                   const TextClassificationOptions& options, TextSelection& selection) {
  TextRowReader reader(selection.eval_file, selection.eval_table);
  ScannedRows rows = scan_rows(reader, true);
  number_labels(rows, selection.label_names,
                selection.label_names == options.label_names ? "the model" : "the training data");
  const auto train = training_hashes(selection, train_hashes);
  selection.eval_labels = std::move(rows.labels);
  for (size_t row = 0; row < rows.hashes.size(); ++row) {
    if (std::binary_search(train.begin(), train.end(), rows.hashes[row])) {
      selection.eval_labels[row] = -1;
      ++selection.report.duplicates;
    }
  }
  add_counts(reader.counts(), selection.report);
}

void count_selected_labels(TextSelection& selection) {
  auto& report = selection.report;
  report.train_counts.assign(selection.label_names.size(), 0);
  report.eval_counts = report.train_counts;
  for (size_t row = 0; row < selection.train_labels.size(); ++row) {
    ++(selection.for_eval[row] ? report.eval_counts
                               : report.train_counts)[selection.train_labels[row]];
  }
  for (const int32_t label : selection.eval_labels) {
    if (label >= 0) {
      ++report.eval_counts[label];
    }
  }
}

// What is suspicious about the training rows, in sentences.
std::vector<std::string> label_warnings(const TextSelection& data) {
  const auto& counts = data.report.train_counts;
  std::vector<std::string> warnings;
  const auto classes =
      std::count_if(counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
  if (classes == 1) {
    const size_t only =
        static_cast<size_t>(std::max_element(counts.begin(), counts.end()) - counts.begin());
    warnings.push_back("the training data has one class only, label=" + data.label_names[only] +
                       ": the model cannot learn to tell labels apart");
  }
  return warnings;
}

void check_text_options(const TextClassificationOptions& options) {
  if (!(options.eval_split >= 0 && options.eval_split < 1)) {
    throw InputError(kLoadTexts, "eval_split=" + std::to_string(options.eval_split),
                     "a share of rows, at least 0 and less than 1");
  }
  if (options.table.label_column.empty()) {
    throw InputError(kLoadTexts, "label_column= is empty", "the column that holds the labels",
                     "name it with --label-column");
  }
  if (options.eval_split > 0 && !options.eval_file.empty()) {
    throw InputError(kLoadTexts,
                     "eval_file=" + options.eval_file.string() +
                         " together with eval_split=" + std::to_string(options.eval_split),
                     "one of the two", "leave eval_split out");
  }
}

int64_t rows_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

std::string label_share_line(int64_t rows, const std::vector<int64_t>& counts,
                             const std::vector<std::string>& label_names) {
  constexpr size_t kShown = 12;
  std::string line = std::to_string(rows) + " rows";
  for (size_t i = 0; i < std::min(counts.size(), kShown); ++i) {
    const double percent =
        100.0 * static_cast<double>(counts[i]) / static_cast<double>(std::max<int64_t>(1, rows));
    line += (i == 0 ? ": " : ", ") + label_names[i] + " " + std::to_string(counts[i]) + " (" +
            format_fixed(percent, 1) + " %)";
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
      "training data: " +
      detail::label_share_line(detail::rows_of(train_counts), train_counts, label_names)};
  if (std::any_of(eval_counts.begin(), eval_counts.end(),
                  [](int64_t count) { return count > 0; })) {
    text.push_back("evaluation data: " + detail::label_share_line(detail::rows_of(eval_counts),
                                                                  eval_counts, label_names));
  }
  std::vector<std::string> left_out;
  const auto say = [&](int64_t count, const char* what) {
    if (count > 0) {
      left_out.push_back(std::to_string(count) + what);
    }
  };
  say(filtered_out, " by filters");
  say(empty_text, " with empty text");
  say(empty_label, " with empty label");
  say(duplicates, " kept out of evaluation (same text in training)");
  if (!left_out.empty()) {
    text.push_back("of " + std::to_string(rows_read) + " rows read, left out: " + joined(left_out));
  }
  return text;
}

TextSelection select_text_rows(std::shared_ptr<const TextFile> train_file,
                               std::shared_ptr<const TextFile> eval_file,
                               const TextClassificationOptions& options) {
  detail::check_text_options(options);
  const bool evaluates = options.eval_split > 0 || eval_file != nullptr;
  TextSelection selection;
  selection.train_file = std::move(train_file);
  selection.eval_file = std::move(eval_file);
  selection.train_table = selection.eval_table = options.table;
  selection.train_table.max_rows = options.max_train_rows;
  selection.eval_table.max_rows = options.max_eval_rows;
  TextRowReader reader(selection.train_file, selection.train_table);
  auto rows = detail::scan_rows(reader, evaluates);
  detail::add_counts(reader.counts(), selection.report);
  selection.label_names = options.label_names;
  if (selection.label_names.empty() ||
      (options.replace_label_names && !knows_labels(selection.label_names, rows.names))) {
    selection.label_names = distinct_labels(rows.names);
  }
  detail::number_labels(rows, selection.label_names, "the model");
  selection.train_labels = std::move(rows.labels);
  selection.for_eval.assign(selection.train_labels.size(), 0);
  if (options.eval_split > 0) {
    detail::split_rows(rows.hashes, options, selection);
  } else if (selection.eval_file != nullptr) {
    detail::add_eval_rows(rows.hashes, options, selection);
  }
  detail::count_selected_labels(selection);
  auto& report = selection.report;
  if (evaluates && detail::rows_of(report.eval_counts) == 0) {
    throw InputError(detail::kLoadTexts,
                     "no row is left for evaluation: training rows=" +
                         std::to_string(detail::rows_of(report.train_counts)) +
                         ", rows whose text training has=" + std::to_string(report.duplicates),
                     "at least one row",
                     "use more rows, a larger eval_split, or another eval_file");
  }
  report.warnings = detail::label_warnings(selection);
  return selection;
}

TextClassificationData load_text_classification(const TextClassificationOptions& options) {
  detail::check_text_options(options);
  TextSelection selection = select_text_rows(
      TextFile::open(options.train_file, detail::kLoadTexts),
      options.eval_file.empty() ? nullptr : TextFile::open(options.eval_file, detail::kLoadTexts),
      options);
  TextClassificationData data;
  const auto add = [](const TextRowReader& reader, const std::shared_ptr<const TextFile>& file,
                      int64_t label, LabelledTexts& side) {
    side.path = file->path();
    side.texts.emplace_back(reader.text());
    side.labels.push_back(label);
    side.lines.push_back(reader.line());
  };
  TextRowReader train(selection.train_file, selection.train_table);
  for (size_t row = 0; train.next(); ++row) {
    add(train, selection.train_file, selection.train_labels[row],
        selection.for_eval[row] ? data.eval : data.train);
  }
  if (selection.eval_file != nullptr) {
    TextRowReader eval(selection.eval_file, selection.eval_table);
    for (size_t row = 0; eval.next(); ++row) {
      if (selection.eval_labels[row] >= 0) {
        add(eval, selection.eval_file, selection.eval_labels[row], data.eval);
      }
    }
  }
  data.label_names = std::move(selection.label_names);
  data.report = std::move(selection.report);
  return data;
}

} // namespace hasten
