// From files with a text and a label column to rows for a classifier: filters,
// label names and numbers, the split into training and evaluation, and what was
// left out on the way.
//
// Every rank reads the files by itself and comes to the same result; nothing here
// communicates or logs. Threading: free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace hasten {

struct TextTableOptions {
  std::string text_column = "text";
  /// Empty: rows have no labels (prediction).
  std::string label_column = "label";
  /// '\0': tab for .tsv and .tab, else comma.
  char delimiter = '\0';
  /// Without a header columns are named by number: "0", "1", ….
  bool has_header = true;
  /// "column=value": only rows whose field equals the value count; several
  /// must all hold.
  std::vector<std::string> filters{};
  /// Stops after this many rows that passed, in file order; 0 reads all.
  int64_t max_rows = 0;
  /// Keeps rows with empty text, so that every row gets an answer (prediction).
  bool keep_empty_text = false;
};

/// The rows of one file that passed. Memory: the texts and labels.
struct TextTable {
  std::filesystem::path path{};
  std::vector<std::string> texts{}; // [row]
  /// As in the file without surrounding white space; empty strings without a
  /// label column. [row]
  std::vector<std::string> labels{};
  std::vector<int64_t> lines{}; // where the row starts in the file [row]

  int64_t rows_read = 0; // records seen, without the header
  int64_t filtered_out = 0; // records that a filter left out
  int64_t empty_text = 0; // records skipped for an empty or blank text
  int64_t empty_label = 0; // records skipped for an empty or blank label

  int64_t size() const { return static_cast<int64_t>(texts.size()); }
  /// "path:line" of a row.
  std::string position(int64_t row) const;
};

/// Reads a CSV or TSV file (hasten/data/csv.h).
/// Throws InputError: whatever CsvReader throws; an unknown column (lists those
///   there are, with a value each); a filter without "="; no row left (says
///   how many each rule left out).
TextTable read_text_table(
    const std::filesystem::path& path, const TextTableOptions& options);

/// Distinct labels, sorted as numbers where all are integers, else by bytes:
/// the index of a name is its label number.
std::vector<std::string> distinct_labels(
    const std::vector<std::string>& labels);

/// Numbers of the table's labels. Where the names are the placeholders
/// "LABEL_0", "LABEL_1", … of a model without names, a label "1" is number 1.
/// Throws InputError naming the first row whose label is not among `names`,
///   all labels the names lack, and the names. `owner` says whose names they
///   are: "the training data", "the model".
std::vector<int64_t> label_numbers(
    const TextTable& table,
    const std::vector<std::string>& names,
    const std::string& owner);

/// Whether label_numbers() finds all of `labels` among `names`.
bool knows_labels(
    const std::vector<std::string>& names,
    const std::vector<std::string>& labels);

struct TextClassificationOptions {
  std::filesystem::path train_file{};
  /// Rows for evaluation. Empty: part of train_file, by eval_split.
  std::filesystem::path eval_file{};
  /// Share of train_file's rows for evaluation, 0 … 1 exclusive; 0 none. Drawn
  /// per label (stratified) by `seed`. Not together with eval_file.
  double eval_split = 0.0;
  uint64_t seed = 42;
  /// Applies to both files, but for max_rows.
  TextTableOptions table{};
  /// First rows of train_file that pass the filters, in file order, before
  /// the split; 0 takes all.
  int64_t max_train_rows = 0;
  /// First rows of eval_file; 0 takes all.
  int64_t max_eval_rows = 0;
  /// Names the model already has, by number; empty makes them from the
  /// training data.
  std::vector<std::string> label_names{};
  /// Of label_names: makes others from the training data where that has a label
  /// they lack, which else is an error.
  bool replace_label_names = false;
};

struct LabelledTexts {
  std::filesystem::path path{};
  std::vector<std::string> texts{}; // [row]
  std::vector<int64_t> labels{}; // [row]
  std::vector<int64_t> lines{}; // where the row starts in the file [row]
  int64_t size() const { return static_cast<int64_t>(texts.size()); }
};

struct TextClassificationReport {
  int64_t rows_read = 0; // of both files
  int64_t filtered_out = 0;
  int64_t empty_text = 0;
  int64_t empty_label = 0;
  /// Rows kept out of evaluation because training has the same text. Those of
  /// an eval_file are left out; those of a split stay in training.
  int64_t duplicates = 0;
  std::vector<int64_t> train_counts{}; // rows by label number
  std::vector<int64_t> eval_counts{};
  /// Sentences the user should see, such as one-class training data.
  std::vector<std::string> warnings{};

  /// For the start banner: rows, label shares, and what was left out and why.
  std::vector<std::string> lines(
      const std::vector<std::string>& label_names) const;
};

struct TextClassificationData {
  LabelledTexts train{};
  LabelledTexts eval{}; // empty without eval_file and eval_split
  std::vector<std::string> label_names{}; // [label number]
  TextClassificationReport report{};
};

/// Reads, names labels, splits, and keeps texts that training has out of
/// evaluation (compared byte for byte).
/// In a split each label with two rows or more is on both sides, before
/// duplicates are kept out.
/// Throws InputError: as read_text_table and label_numbers; no label column;
///   eval_split outside [0, 1); eval_file together with eval_split; no row left
///   to evaluate.
TextClassificationData load_text_classification(
    const TextClassificationOptions& options);

} // namespace hasten
