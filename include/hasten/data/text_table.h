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

#include "hasten/data/text_file.h"

namespace hasten {

struct TextTableOptions {
  std::string text_column = "text";
  /// Empty: rows have no labels (prediction).
  std::string label_column = "label";
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
  /// Without surrounding white space; empty without a label column.
  std::string_view label() const { return label_; }
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
  size_t label_column_ = 0;
  std::vector<std::pair<size_t, std::string>> filters_{}; // column, value
  int64_t passed_ = 0;
  TextRowCounts counts_{};
  std::string_view text_{};
  std::string_view label_{};
};

/// The rows of one file that passed. Memory: the texts and labels.
struct TextTable : TextRowCounts {
  std::filesystem::path path{};
  std::vector<std::string> texts{}; // [row]
  /// As in the file without surrounding white space; empty strings without a
  /// label column. [row]
  std::vector<std::string> labels{};
  std::vector<int64_t> lines{}; // where the row starts in the file [row]

  int64_t size() const { return static_cast<int64_t>(texts.size()); }
  /// "path:line" of a row.
  std::string position(int64_t row) const;
};

/// Reads a whole file. Throws InputError: as TextRowReader; no row left (says how
/// many each rule left out).
TextTable read_text_table(const std::filesystem::path& path, const TextTableOptions& options);

/// Distinct labels, sorted as numbers where all are integers, else by bytes:
/// the index of a name is its label number.
std::vector<std::string> distinct_labels(const std::vector<std::string>& labels);

/// Numbers of the table's labels. Where the names are the placeholders
/// "LABEL_0", "LABEL_1", … of a model without names, a label "1" is number 1.
/// Throws InputError naming the first row whose label is not among `names`,
///   all labels the names lack, and the names. `owner` says whose names they
///   are: "the training data", "the model".
std::vector<int64_t> label_numbers(const TextTable& table, const std::vector<std::string>& names,
                                   const std::string& owner);

namespace detail {

/// What label_numbers() throws for the row at `position`.
[[noreturn]] void fail_unknown_label(const std::string& position, const std::string& label,
                                     const std::vector<std::string>& all_unknown,
                                     const std::vector<std::string>& names,
                                     const std::string& owner);

/// Number of each of `labels` by the rule of label_numbers(); -1 where the names
/// lack it.
std::vector<int64_t> numbers_of_labels(const std::vector<std::string>& labels,
                                       const std::vector<std::string>& names);

} // namespace detail

/// Whether label_numbers() finds all of `labels` among `names`.
bool knows_labels(const std::vector<std::string>& names, const std::vector<std::string>& labels);

} // namespace hasten
