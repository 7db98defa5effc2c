// Rows of a file with a text and perhaps a label column: CSV and TSV
// (hasten/data/csv.h), or JSON lines by the endings .jsonl, .ndjson and .json
// (hasten/data/jsonl.h). Filters, what is skipped and counted, and what labels are
// called. Nothing here logs. Threading: one reader per thread; free functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hasten/data/problem_type.h"
#include "hasten/data/text_file.h"

namespace hasten {

struct TextTableOptions {
  std::string text_column = "text";
  /// Empty: rows have no labels (prediction).
  std::string label_column = "label";
  /// Rows of multi_label may have none of the labels; other rows without a label are
  /// left out.
  ProblemType problem_type = ProblemType::single_label;
  /// Of multi_label, in place of label_column: columns of 0 and 1 (or false and true),
  /// one a label, which they name.
  std::vector<std::string> label_columns{};
  /// Of multi_label without label_columns: what stands between a row's labels.
  std::string label_separator{};
  /// '\0': tab for .tsv and .tab, else comma. Not for JSON lines.
  char delimiter = '\0';
  /// Without a header columns are named by number: "0", "1", …. JSON lines name
  /// them in each line.
  bool has_header = true;
  /// "column=value": only rows whose field equals the value count; several
  /// must all hold.
  std::vector<std::string> filters{};
  /// Stops after this many rows that passed, in file order; 0 reads all.
  int64_t max_rows = 0;
  /// Keeps rows with empty text, so that every row gets an answer (prediction).
  bool keep_empty_text = false;
};

/// What a reader has seen of a file.
struct TextRowCounts {
  int64_t rows_read = 0; // records seen, without the header
  int64_t filtered_out = 0; // records that a filter left out
  int64_t empty_text = 0; // records skipped for an empty or blank text
  int64_t empty_label = 0; // records skipped for an empty or blank label
};

/// The rows of one file that pass, one by one. Memory: TextWindow's, so that
/// a regular file may be larger than memory.
class TextRowReader {
 public:
  /// Throws InputError: whatever CsvReader or JsonlReader throw; an unknown column
  ///   (lists those there are, with a value each); a filter without "="; a
  ///   delimiter or has_header=false for JSON lines.
  TextRowReader(std::shared_ptr<const TextFile> file, const TextTableOptions& options);
  ~TextRowReader();
  TextRowReader(TextRowReader&&) noexcept;

  /// Moves to the next row that passes; false behind the last one, which may be
  /// the first. Throws InputError as the readers do.
  bool next();
  /// Of the current row; views until next().
  std::string_view text() const { return text_; }
  /// Of label_column, or of one of label_columns; without surrounding white space.
  /// Empty without a label column.
  std::string_view label(size_t column = 0) const;
  /// Line at which the row starts, from 1.
  int64_t line() const;
  /// "path:line".
  std::string position() const;
  const TextRowCounts& counts() const { return counts_; }
  /// Bytes of the file up to the current row's end, for progress.
  int64_t bytes_read() const;

  /// For whoever has read to the end: throws InputError saying how many each rule
  /// left out where no row passed.
  void require_rows() const;

 private:
  struct Format;
  TextTableOptions options_;
  std::unique_ptr<Format> format_;
  size_t text_column_ = 0;
  std::vector<size_t> label_columns_{};
  std::vector<std::pair<size_t, std::string>> filters_{}; // column, value
  int64_t passed_ = 0;
  TextRowCounts counts_{};
  std::string_view text_{};
};

/// Distinct labels, sorted as numbers where all are integers, else by bytes:
/// the index of a name is its label number.
std::vector<std::string> distinct_labels(const std::vector<std::string>& labels);

/// Number of each of `labels`; -1 where the names lack it. Where the names are the
/// placeholders "LABEL_0", "LABEL_1", … of a model without names, a label "1" is
/// number 1.
std::vector<int64_t> label_numbers(const std::vector<std::string>& labels,
                                   const std::vector<std::string>& names);

} // namespace hasten
