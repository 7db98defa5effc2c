#include "hasten/text/text_classification.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/random.h"
#include "hasten/text/utf8.h"

namespace hasten {

namespace detail {

constexpr const char* kSelectRows = "data::select_text_rows";
using RowSide = SelectedRows::Side;

// Number of evaluation samples per label: `share` of all samples, distributed over labels by
// largest remainder. A label with two samples or more gives at least one, and never all.
std::vector<int64_t> stratified_counts(const std::vector<std::vector<int64_t>>& rows,
                                       double share) {
  std::vector<int64_t> counts;
  std::vector<std::pair<double, size_t>> remainders;
  int64_t all = 0;
  for (size_t label = 0; label < rows.size(); ++label) {
    const auto size = std::ssize(rows[label]);
    const double exact = share * static_cast<double>(size);
    counts.push_back(std::clamp<int64_t>(static_cast<int64_t>(exact), size >= 2 ? 1 : 0,
                                         std::max<int64_t>(size - 1, 0)));
    remainders.emplace_back(static_cast<double>(counts[label]) - exact, label);
    all += size;
  }
  std::ranges::sort(remainders); // most underserved first
  int64_t missing = std::llround(share * static_cast<double>(all)) -
                    std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (const auto& [remainder, label] : remainders) {
    if (missing > 0 && remainder < 0 && counts[label] + 1 < std::ssize(rows[label])) {
      ++counts[label];
      --missing;
    }
  }
  return counts;
}

using TextHash = std::pair<uint64_t, uint64_t>;

TextHash hash_text(const TextRowReader& reader) {
  // The seed separates "ab", "c" from "a", "bc".
  const std::string_view text = reader.text();
  XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  if (const std::string_view pair = reader.text_pair(); !pair.empty()) {
    hash = XXH3_128bits_withSeed(pair.data(), pair.size(), hash.low64 ^ hash.high64);
  }
  return {hash.high64, hash.low64};
}

[[noreturn]] void refuse_label(const TextRowReader& reader, size_t column, const std::string& name,
                               const std::string& expected) {
  throw InputError(kSelectRows,
                   reader.position() + ": " + name + "=" + std::string(reader.label(column)),
                   expected);
}

int32_t read_number(const TextRowReader& reader, const TextTableOptions& table) {
  const std::optional<float> value = parse_number<float>(reader.label());
  if (!value || !std::isfinite(*value)) {
    refuse_label(reader, 0, table.label_column, "a finite number");
  }
  return std::bit_cast<int32_t>(*value);
}

// The sample's label as text: like "101" for label columns, else as in the file.
std::string label_text(const TextRowReader& reader, const TextTableOptions& table) {
  std::string text(table.label_columns.empty() ? reader.label() : std::string_view());
  for (size_t i = 0; i < table.label_columns.size(); ++i) {
    const std::string_view flag = reader.label(i);
    const bool yes = flag == "1" || flag == "1.0" || flag == "true" || flag == "True";
    if (!yes && flag != "0" && flag != "0.0" && flag != "false" && flag != "False") {
      refuse_label(reader, i, table.label_columns[i], "0 or 1");
    }
    text += yes ? '1' : '0';
  }
  return text;
}

// Names of the classes in a label_text().
std::vector<std::string> class_names(const std::string& label, const TextTableOptions& table) {
  if (table.problem_type == ProblemType::single_label) {
    return {label};
  }
  if (table.problem_type == ProblemType::unlabelled) {
    return {};
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < table.label_columns.size(); ++i) {
    if (label[i] == '1') {
      names.push_back(table.label_columns[i]);
    }
  }
  if (table.label_columns.empty()) {
    for (const std::string& part : split(label, table.label_separator)) {
      if (const auto name = trimmed(part); !name.empty()) {
        names.emplace_back(name);
      }
    }
  }
  return names;
}

// Result of one pass over a file.
struct ScannedRows {
  /// regression: the number's bits; word_labels: 0; else the index of the distinct label. [row]
  std::vector<int32_t> labels{};
  std::vector<TextHash> hashes{}; // [row]; empty if not requested
  // The classes of each distinct label, in order of appearance, and where each is first.
  std::vector<std::string> names{};
  std::vector<std::string> positions{}; // [name]
  std::vector<size_t> ends{}; // of each distinct label in `names`
};

ScannedRows scan_rows(TextRowReader& reader, const TextTableOptions& table, bool with_hashes) {
  ScannedRows rows;
  std::unordered_map<std::string, int32_t> places;
  while (reader.next()) {
    if (table.problem_type == ProblemType::regression) {
      rows.labels.push_back(read_number(reader, table));
    } else if (table.problem_type == ProblemType::word_labels) {
      for (std::string& label : read_labelled_words(reader, table).labels) {
        if (places.try_emplace(label, 0).second) {
          rows.names.push_back(std::move(label));
          rows.positions.push_back(reader.position());
        }
      }
      rows.labels.push_back(0);
    } else {
      std::string label = label_text(reader, table);
      const auto [entry, fresh] =
          places.try_emplace(std::move(label), static_cast<int32_t>(places.size()));
      if (fresh) {
        for (std::string& name : class_names(entry->first, table)) {
          rows.names.push_back(std::move(name));
          rows.positions.push_back(reader.position());
        }
        rows.ends.push_back(rows.names.size());
      }
      rows.labels.push_back(entry->second);
    }
    if (with_hashes) {
      rows.hashes.push_back(hash_text(reader));
    }
  }
  reader.require_rows();
  return rows;
}

constexpr size_t kShownLabels = 20; // in errors

[[noreturn]] void fail_unknown_label(const ScannedRows& rows, const std::vector<int64_t>& numbers,
                                     const std::vector<std::string>& names,
                                     const std::string& owner) {
  std::vector<std::string> unknown;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < 0) {
      unknown.push_back(rows.names[i]);
    }
  }
  const auto first = static_cast<size_t>(std::ranges::find(numbers, -1) - numbers.begin());
  throw InputError("data::label_numbers",
                   rows.positions[first] + ": label=" + unknown[0] + " is unknown to " + owner +
                       " (all unknown labels: " +
                       joined(first_items(distinct_labels(unknown), kShownLabels)) + ")",
                   "one of: " + joined(first_items(names, kShownLabels)),
                   "exclude such samples with a filter, or train with these labels");
}

// Replaces indices of distinct labels by class numbers, or by indices into label_sets.
void number_labels(ScannedRows& rows, ProblemType problem_type, const std::string& owner,
                   TextSelection& selection) {
  const auto numbers = label_numbers(rows.names, selection.label_names);
  if (std::ranges::find(numbers, -1) != numbers.end()) {
    fail_unknown_label(rows, numbers, selection.label_names, owner);
  }
  if (problem_type == ProblemType::single_label) {
    for (int32_t& label : rows.labels) {
      label = static_cast<int32_t>(numbers[label]);
    }
  } else if (problem_type == ProblemType::multi_label) {
    for (int32_t& label : rows.labels) {
      label += static_cast<int32_t>(selection.label_sets.size());
    }
    auto begin = numbers.begin();
    for (const size_t end : rows.ends) {
      std::vector<int32_t> set(begin, numbers.begin() + static_cast<std::ptrdiff_t>(end));
      begin += std::ssize(set);
      std::ranges::sort(set);
      set.erase(std::unique(set.begin(), set.end()), set.end());
      selection.label_sets.push_back(std::move(set));
    }
  }
}

std::vector<std::string> choose_label_names(const ScannedRows& rows,
                                            const TextClassificationOptions& options) {
  const TextTableOptions& table = options.table;
  if (table.problem_type == ProblemType::regression) {
    return {table.label_column};
  }
  if (table.problem_type == ProblemType::unlabelled) {
    return {};
  }
  if (!table.label_columns.empty()) {
    return table.label_columns;
  }
  auto names = distinct_labels(rows.names);
  const auto numbers = label_numbers(names, options.label_names);
  const bool known = std::ranges::find(numbers, -1) == numbers.end();
  return options.label_names.empty() || (options.replace_label_names && !known)
             ? names
             : options.label_names;
}

void add_counts(const TextRowCounts& counts, TextClassificationReport& report) {
  report.rows_read += counts.rows_read;
  report.filtered_out += counts.filtered_out;
  report.empty_text += counts.empty_text;
  report.empty_label += counts.empty_label;
}

// Reads other files, whose samples all go to `side`. Returns their hashes if requested.
std::vector<TextHash> add_files(const TextFiles& files, int64_t max_rows, RowSide side,
                                bool with_hashes, const TextClassificationOptions& options,
                                TextSelection& selection) {
  SelectedRows selected{.files = files, .table = options.table};
  selected.table.max_rows = max_rows;
  TextRowReader reader(files, selected.table);
  ScannedRows rows = scan_rows(reader, selected.table, with_hashes);
  add_counts(reader.counts(), selection.report);
  if (selection.files.empty()) {
    selection.label_names = choose_label_names(rows, options);
  }
  if (selection.label_names.empty() && options.table.problem_type != ProblemType::unlabelled) {
    throw InputError(
        kSelectRows,
        "no sample of " + files.names() + " has a label in column=" + options.table.label_column,
        "at least one sample with a text and a label");
  }
  number_labels(rows, options.table.problem_type,
                selection.label_names == options.label_names ? "the model" : "the training data",
                selection);
  selected.sides.assign(rows.labels.size(), side);
  selected.labels = std::move(rows.labels);
  selection.files.push_back(std::move(selected));
  return std::move(rows.hashes);
}

// Moves a share of the training samples to evaluation; for single_label the same share of each
// label.
void draw_rows(const TextClassificationOptions& options, TextSelection& selection) {
  SelectedRows& file = selection.files[0];
  const bool by_label = options.table.problem_type == ProblemType::single_label;
  std::vector<std::vector<int64_t>> rows(by_label ? selection.label_names.size() : 1); // [label][k]
  for (size_t row = 0; row < file.labels.size(); ++row) {
    rows[by_label ? file.labels[row] : 0].push_back(static_cast<int64_t>(row));
  }
  const auto counts = stratified_counts(rows, options.eval_split);
  OrderRng rng(stream_seed("eval_split", options.seed), 0);
  for (size_t label = 0; label < rows.size(); ++label) {
    rng.shuffle(rows[label].data(), rows[label].size());
    for (int64_t k = 0; k < counts[label]; ++k) {
      file.sides[rows[label][k]] = RowSide::eval;
    }
  }
}

// Hashes of the training samples, sorted.
std::vector<TextHash> training_hashes(const SelectedRows& rows,
                                      const std::vector<TextHash>& hashes) {
  std::vector<TextHash> sorted;
  for (size_t row = 0; row < hashes.size(); ++row) {
    if (rows.sides[row] == RowSide::train) {
      sorted.push_back(hashes[row]);
    }
  }
  std::ranges::sort(sorted);
  return sorted;
}

// Moves evaluation samples whose text the training data has to `side`. `hashes` are those of
// `rows`; `training` is sorted.
void keep_out_of_evaluation(SelectedRows& rows, const std::vector<TextHash>& hashes,
                            const std::vector<TextHash>& training, RowSide side,
                            TextClassificationReport& report) {
  for (size_t row = 0; row < hashes.size(); ++row) {
    if (rows.sides[row] == RowSide::eval && std::ranges::binary_search(training, hashes[row])) {
      rows.sides[row] = side;
      ++report.duplicates;
    }
  }
}

void count_row(int32_t label, ProblemType problem_type, const TextSelection& selection,
               TextSideReport& side) {
  ++side.rows;
  if (problem_type == ProblemType::word_labels || problem_type == ProblemType::unlabelled) {
    return;
  }
  if (problem_type == ProblemType::regression) {
    const double value = std::bit_cast<float>(label);
    side.least = side.rows == 1 ? value : std::min(side.least, value);
    side.most = side.rows == 1 ? value : std::max(side.most, value);
    side.sum += value;
  } else {
    side.counts.resize(selection.label_names.size());
    for (const int32_t number : problem_type == ProblemType::single_label
                                    ? std::span<const int32_t>(&label, 1)
                                    : std::span<const int32_t>(selection.label_sets[label])) {
      ++side.counts[number];
    }
  }
}

void warn_of_one_class(TextSelection& selection) {
  const auto& counts = selection.report.train.counts;
  const auto only = std::ranges::find_if(counts, [](int64_t n) { return n > 0; });
  if (only != counts.end() && *only == selection.report.train.rows) {
    selection.report.warnings.push_back("the training data has only one class, label=" +
                                        selection.label_names[only - counts.begin()] +
                                        ": the model cannot learn to distinguish labels");
  }
}

void check_text_options(const TextClassificationOptions& options, const TextFiles& eval_files) {
  if (!(options.eval_split >= 0 && options.eval_split < 1)) {
    throw InputError(kSelectRows, "eval_split=" + std::to_string(options.eval_split),
                     "a share of the samples, at least 0 and less than 1");
  }
  const TextTableOptions& table = options.table;
  if ((table.label_columns.empty() && table.label_column.empty()) !=
      (table.problem_type == ProblemType::unlabelled)) {
    throw InputError(
        kSelectRows,
        "problem_type=" + spelling(table.problem_type) + ", label_column=" + table.label_column,
        "a column that holds the labels, and none for unlabelled", "name it with --label-column");
  }
  if (table.problem_type == ProblemType::multi_label
          ? table.label_columns.empty() && table.label_separator.empty()
          : !table.label_columns.empty()) {
    throw InputError(kSelectRows,
                     "problem_type=" + spelling(table.problem_type) + ", label_columns=" +
                         joined(table.label_columns) + ", label_separator=" + table.label_separator,
                     "label_columns or label_separator for multi_label_classification, and "
                     "neither for other problem types");
  }
  if (options.eval_split > 0 && !eval_files.empty()) {
    throw InputError(kSelectRows,
                     "eval_file=" + eval_files.names() +
                         " together with eval_split=" + std::to_string(options.eval_split),
                     "one of the two", "omit eval_split");
  }
}

// "1234 samples: neg 617 (50.0 %), pos 617 (50.0 %)", with the first labels if there are many. For
// regression the range and the mean.
std::string side_line(const TextSideReport& side, const std::vector<std::string>& label_names,
                      ProblemType type) {
  const std::string line = std::to_string(side.rows) + " samples";
  if (type == ProblemType::word_labels || type == ProblemType::unlabelled) {
    return line;
  }
  const auto rows = static_cast<double>(std::max<int64_t>(1, side.rows));
  if (side.counts.empty()) {
    return line + ", " + label_names.at(0) + " from " + format_digits(side.least, 4) + " to " +
           format_digits(side.most, 4) + ", mean " + format_digits(side.sum / rows, 4);
  }
  std::vector<std::string> labels;
  for (size_t i = 0; i < side.counts.size(); ++i) {
    labels.push_back(label_names.at(i) + " " + std::to_string(side.counts[i]) + " (" +
                     format_fixed(100.0 * static_cast<double>(side.counts[i]) / rows, 1) + " %)");
  }
  return line + ": " + joined(first_items(std::move(labels), 12, " more labels"));
}

} // namespace detail

std::vector<std::string> TextClassificationReport::lines(
    const std::vector<std::string>& label_names, ProblemType type) const {
  std::vector<std::string> text{"training data: " + detail::side_line(train, label_names, type)};
  if (eval.rows > 0) {
    text.push_back("evaluation data: " + detail::side_line(eval, label_names, type));
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
    text.push_back("of " + std::to_string(rows_read) +
                   " records read, left out: " + joined(left_out));
  }
  return text;
}

TextSelection select_text_rows(const TextFiles& train_files, const TextFiles& eval_files,
                               const TextClassificationOptions& options) {
  using detail::RowSide;
  detail::check_text_options(options, eval_files);
  const bool evaluates = options.eval_split > 0 || !eval_files.empty();
  TextSelection selection;
  auto& [files, sets, names, report] = selection;
  const auto hashes = detail::add_files(train_files, options.max_train_rows, RowSide::train,
                                        evaluates, options, selection);
  if (options.eval_split > 0) {
    detail::draw_rows(options, selection);
    detail::keep_out_of_evaluation(files[0], hashes, detail::training_hashes(files[0], hashes),
                                   RowSide::train, report);
  } else if (!eval_files.empty()) {
    const auto seen = detail::add_files(eval_files, options.max_eval_rows, RowSide::eval, true,
                                        options, selection);
    detail::keep_out_of_evaluation(files[1], seen, detail::training_hashes(files[0], hashes),
                                   RowSide::left_out, report);
  }
  const ProblemType problem_type = options.table.problem_type;
  for (const SelectedRows& rows : files) {
    for (size_t row = 0; row < rows.labels.size(); ++row) {
      if (rows.sides[row] != RowSide::left_out) {
        detail::count_row(rows.labels[row], problem_type, selection,
                          rows.sides[row] == RowSide::train ? report.train : report.eval);
      }
    }
  }
  if (evaluates && report.eval.rows == 0) {
    throw InputError(
        detail::kSelectRows,
        "no sample is left for evaluation: training samples=" + std::to_string(report.train.rows) +
            ", samples whose text is also in the training data=" +
            std::to_string(report.duplicates),
        "at least one sample", "use more samples, a larger eval_split, or another eval_file");
  }
  if (problem_type == ProblemType::single_label) {
    detail::warn_of_one_class(selection);
  }
  return selection;
}

} // namespace hasten
