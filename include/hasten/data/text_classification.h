// From files with a text and a label column to rows for a classifier: label
// numbers, the split into training and evaluation, and what was left out on the
// way.
//
// Every rank reads the files by itself and comes to the same result; nothing here
// communicates or logs. Threading: free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hasten/data/text_table.h"

namespace hasten {

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

/// Its counts of rows are of both files.
struct TextClassificationReport : TextRowCounts {
  /// Rows kept out of evaluation because training has the same text. Those of
  /// an eval_file are left out; those of a split stay in training.
  int64_t duplicates = 0;
  std::vector<int64_t> train_counts{}; // rows by label number
  std::vector<int64_t> eval_counts{};
  /// Sentences the user should see, such as one-class training data.
  std::vector<std::string> warnings{};

  /// For the start banner: rows, label shares, and what was left out and why.
  std::vector<std::string> lines(const std::vector<std::string>& label_names) const;
};

struct TextClassificationData {
  LabelledTexts train{};
  LabelledTexts eval{}; // empty without eval_file and eval_split
  std::vector<std::string> label_names{}; // [label number]
  TextClassificationReport report{};
};

/// Which rows go where, without their texts.
struct TextSelection {
  std::shared_ptr<const TextFile> train_file{};
  std::shared_ptr<const TextFile> eval_file{}; // null without one
  /// Options of a reader of each; what it gives is numbered from 0 as "row".
  TextTableOptions train_table{};
  TextTableOptions eval_table{};
  std::vector<int32_t> train_labels{}; // label numbers [row of train_file]
  /// 1 where the row is for evaluation. [row of train_file]
  std::vector<char> for_eval{};
  /// Label numbers; -1 where training has the same text. [row of eval_file]
  std::vector<int32_t> eval_labels{};
  std::vector<std::string> label_names{}; // [label number]
  TextClassificationReport report{};
};

/// Reads the files once, names labels, splits, and keeps texts that training has
/// out of evaluation (compared by 128-bit hashes).
/// In a split each label with two rows or more is on both sides, before
/// duplicates are kept out. `train_file` and `eval_file` are those of `options`,
/// opened, or stand in for them.
/// Memory: 21 bytes a row, 5 without evaluation; no text.
/// Throws InputError: as TextRowReader and label_numbers; no label column;
///   eval_split outside [0, 1); eval_file together with eval_split; no row left
///   to evaluate.
TextSelection select_text_rows(std::shared_ptr<const TextFile> train_file,
                               std::shared_ptr<const TextFile> eval_file,
                               const TextClassificationOptions& options);

/// select_text_rows() with the texts of `options`' files. Memory: the texts.
/// Throws InputError: as it and TextFile::open.
TextClassificationData load_text_classification(const TextClassificationOptions& options);

namespace detail {

/// Whether each row is for evaluation; seeded, by label.
std::vector<char> draw_eval_split(const std::vector<int32_t>& labels, size_t num_labels,
                                  double share, uint64_t seed);
/// "1234 rows: neg 617 (50.0 %), pos 617 (50.0 %)"; the first shares of many.
std::string label_share_line(int64_t rows, const std::vector<int64_t>& counts,
                             const std::vector<std::string>& label_names);

} // namespace detail

} // namespace hasten
