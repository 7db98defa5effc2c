// Rows whose labels are numbers: one value a row (regression), or which of several
// labels a row has. Beside hasten/data/text_classification.h, which is for one label
// out of several.
// Every rank reads the files by itself and comes to the same result; nothing here
// communicates or logs. Threading: free functions; const members of the data set.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/data/text_classification.h"

namespace hasten {

/// eval_split draws rows whatever their labels are; replace_label_names is not read.
/// table.label_column is the one column of a regression or of label_separator;
/// label_names those of label_separator.
struct TextTargetsOptions : TextClassificationOptions {
  /// Columns of 0 and 1 (or false and true), one a label, which they name.
  std::vector<std::string> label_columns{};
  /// Else, if not empty: label_column names a row's labels with this between them;
  /// a row without any has none of the labels.
  std::string label_separator{};
};

struct TargetTexts {
  std::vector<std::string> texts{}; // [row]
  std::vector<float> targets{}; // [row][target]
  std::vector<int64_t> lines{}; // where the row starts in the file [row]
  int64_t size() const { return static_cast<int64_t>(texts.size()); }
};

struct TextTargets {
  TargetTexts train{};
  TargetTexts eval{}; // empty without eval_file and eval_split
  /// Of a regression the column's name. [target]
  std::vector<std::string> label_names{};
  bool regression = false;
  int64_t targets_per_row() const { return static_cast<int64_t>(label_names.size()); }
  /// Rows kept out of evaluation because training has the same text.
  int64_t duplicates = 0;
  int64_t left_out = 0; // rows without a text or a value
  /// For the start banner.
  std::vector<std::string> lines() const;
};

/// Without label_columns and label_separator a regression on label_column.
/// Memory: the texts, once more while they are read.
/// Throws InputError: as read_text_table; naming file, line and column of a label
///   that is no finite number, or neither 0 nor 1, or unknown to label_names; no row
///   left on a side; eval_file together with eval_split.
TextTargets load_text_targets(const TextTargetsOptions& options);

/// The targets of one file whose labels are known: [row][label name].
TargetTexts read_text_targets(const std::filesystem::path& path, const TextTargetsOptions& options,
                              const std::vector<std::string>& label_names);

/// `rows` with "labels" of floats in its batches: [B] for one target a row and
/// `squeeze`, else [B, targets].
class TargetDataset : public Dataset {
 public:
  /// `targets` [row][target]. Throws InputError where their number is not `rows`'
  /// times `targets_per_row`.
  TargetDataset(std::shared_ptr<const Dataset> rows, std::vector<float> targets,
                int64_t targets_per_row, bool squeeze);
  int64_t size() const override { return rows_->size(); }
  int64_t length(int64_t index) const override { return rows_->length(index); }
  Batch collate(const std::vector<int64_t>& indices) const override;

 private:
  std::shared_ptr<const Dataset> rows_;
  std::vector<float> targets_;
  int64_t targets_per_row_;
  bool squeeze_;
};

} // namespace hasten
