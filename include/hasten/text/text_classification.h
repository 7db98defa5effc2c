// Selects the training and evaluation samples of files with texts and labels, and determines their
// labels: class numbers, numbers (regression), sets of classes, or a class for each word.
//
// Every rank reads the files itself and gets the same result. Nothing here communicates or logs.
// Threading: free functions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hasten/text/text_table.h"

namespace hasten {

struct TextClassificationOptions {
  /// Share of the training file's samples to use for evaluation, in [0, 1); 0 uses none. `seed`
  /// draws them; for single_label the split is stratified. Cannot be combined with an evaluation
  /// file.
  double eval_split = 0.0;
  uint64_t seed = 42;
  /// Used for both files, except for its max_rows.
  TextTableOptions table{};
  /// Use only the first max_train_rows samples of the training file that pass the filters, before
  /// the split. 0 uses all.
  int64_t max_train_rows = 0;
  /// The same for the evaluation file. 0 uses all.
  int64_t max_eval_rows = 0;
  /// The model's label names, by label number. Empty: the names come from the training data.
  /// Ignored if columns give the names (label_columns, regression).
  std::vector<std::string> label_names{};
  /// If the training data has a label that label_names lacks: true takes new names from the
  /// training data, false throws InputError. word_labels: the tags of all words.
  bool replace_label_names = false;
};

/// Counts of the training or evaluation samples.
struct TextSideReport {
  int64_t rows = 0;
  std::vector<int64_t> counts{}; // samples with each label [label number]; empty for other types
  double least = 0, most = 0, sum = 0; // regression only: of the targets
};

/// The inherited counts are those of both files together.
struct TextClassificationReport : TextRowCounts {
  /// Samples not used for evaluation because the training data has the same text. From an
  /// evaluation file they are left out. From a split they stay in the training data.
  int64_t duplicates = 0;
  TextSideReport train{};
  TextSideReport eval{};
  /// Sentences for the user, for example that the training data has only one class.
  std::vector<std::string> warnings{};

  /// Text for the start banner: numbers of samples, labels, and what was left out and why.
  std::vector<std::string> lines(const std::vector<std::string>& label_names,
                                 ProblemType type = ProblemType::single_label) const;
};

/// Use of each sample of the training or the evaluation files, without the texts.
struct SelectedRows {
  enum class Side : char { train, eval, left_out };
  TextFiles files{};
  /// Reader options. [row] is the index of a sample among those that the reader returns.
  TextTableOptions table{};
  /// single_label: the class number. regression: the bits of the number as a float. multi_label: an
  /// index into TextSelection::label_sets. Otherwise 0. [row]
  std::vector<int32_t> labels{};
  std::vector<Side> sides{}; // [row]
};

struct TextSelection {
  std::vector<SelectedRows> files{}; // the training files, then the evaluation files if any
  /// Each distinct set of labels, as ascending label numbers.
  std::vector<std::vector<int32_t>> label_sets{};
  /// [label number]; for regression the column's name, for unlabelled none
  std::vector<std::string> label_names{};
  TextClassificationReport report{};
};

/// Reads each file once, names the labels, draws the split, and removes from evaluation the texts
/// that training has (compared by 128-bit hashes). `eval_files` may be empty. Before this removal, a
/// single_label split has every label with two samples or more on both sides.
/// Memory: 21 bytes per sample (5 without evaluation) and the distinct labels; no text.
/// Throws InputError as TextRowReader does, and if there is no label column; a sample has another
/// number of labels than words; a label is not among the names, not a finite number or neither 0 nor 1; eval_split is outside [0, 1); eval_files and
/// eval_split are both given; or no sample remains for evaluation.
TextSelection select_text_rows(const TextFiles& train_files, const TextFiles& eval_files,
                               const TextClassificationOptions& options);

} // namespace hasten
