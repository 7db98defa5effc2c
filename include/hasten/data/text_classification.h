// Which rows of files with a text and labels train and evaluate, and what their labels
// are: class numbers, numbers (regression) or sets of classes.
//
// Every rank reads the files by itself and comes to the same result; nothing here
// communicates or logs. Threading: free functions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hasten/data/text_table.h"

namespace hasten {

struct TextClassificationOptions {
  /// Share of the training file's rows for evaluation, 0 … 1 exclusive; 0 none. Drawn
  /// by `seed`, of single_label per label (stratified). Not together with a file for
  /// evaluation.
  double eval_split = 0.0;
  uint64_t seed = 42;
  /// Applies to both files, but for max_rows.
  TextTableOptions table{};
  /// First rows of the training file that pass the filters, in file order, before
  /// the split; 0 takes all.
  int64_t max_train_rows = 0;
  /// First rows of the file for evaluation; 0 takes all.
  int64_t max_eval_rows = 0;
  /// Names the model already has, by number; empty makes them from the
  /// training data. Not read where columns name them: label_columns, regression.
  std::vector<std::string> label_names{};
  /// Of label_names: makes others from the training data where that has a label
  /// they lack, which else is an error.
  bool replace_label_names = false;
};

/// Of the rows of training or of evaluation.
struct TextSideReport {
  int64_t rows = 0;
  std::vector<int64_t> counts{}; // rows with the label [label number]; not of regression
  /// Of a regression.
  double least = 0, most = 0, sum = 0;
};

/// Its counts of rows are of both files.
struct TextClassificationReport : TextRowCounts {
  /// Rows kept out of evaluation because training has the same text. Those of
  /// a second file are left out; those of a split stay in training.
  int64_t duplicates = 0;
  TextSideReport train{};
  TextSideReport eval{};
  /// Sentences the user should see, such as one-class training data.
  std::vector<std::string> warnings{};

  /// For the start banner: rows, labels, and what was left out and why.
  std::vector<std::string> lines(const std::vector<std::string>& label_names) const;
};

/// Which rows of one file go where, without their texts.
struct SelectedRows {
  enum class Side : char { train, eval, left_out };
  std::shared_ptr<const TextFile> file{};
  /// Options of a reader; what it gives is numbered from 0 as "row".
  TextTableOptions table{};
  /// The class's number; of a regression the bits of the number, a float; of
  /// multi_label a place in TextSelection::label_sets. [row]
  std::vector<int32_t> labels{};
  std::vector<Side> sides{}; // [row]
};

struct TextSelection {
  std::vector<SelectedRows> files{}; // training's, and evaluation's if there is one
  /// Each distinct set of labels, as ascending label numbers.
  std::vector<std::vector<int32_t>> label_sets{};
  std::vector<std::string> label_names{}; // [label number]; of a regression its column
  TextClassificationReport report{};
};

/// Reads the files once, names labels, splits, and keeps texts that training has
/// out of evaluation (compared by 128-bit hashes). `eval_file` may be null.
/// In a split of single_label each label with two rows or more is on both sides, before
/// duplicates are kept out.
/// Memory: 21 bytes a row, 5 without evaluation, and the distinct labels; no text.
/// Throws InputError: as TextRowReader; no label column; a label that the names lack,
///   that is no finite number, or that is neither 0 nor 1; eval_split outside [0, 1);
///   eval_file together with eval_split; no row left to evaluate.
TextSelection select_text_rows(const std::shared_ptr<const TextFile>& train_file,
                               const std::shared_ptr<const TextFile>& eval_file,
                               const TextClassificationOptions& options);

} // namespace hasten
