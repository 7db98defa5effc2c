// Reads the samples of files with a text column and optional labels: CSV and TSV
// (hasten/text/csv.h), or JSON Lines or an array if the file ends in .jsonl, .ndjson or .json
// (hasten/text/jsonl.h). Files with lists of words are JSON Lines or CoNLL (hasten/text/conll.h). Applies filters, counts skipped records and numbers the labels. Nothing
// here logs. Threading: one reader per thread; free functions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hasten/text/packing.h"
#include "hasten/text/problem_type.h"
#include "hasten/text/text_file.h"

namespace hasten {

struct TextTableOptions {
  /// For word_labels a column of lists of words.
  std::string text_column = "text";
  /// Column of the second text of a pair; empty: samples have one text.
  std::string text_pair_column{};
  /// Empty: samples have no labels (prediction, unlabelled). For word_labels a column of lists, with
  /// a label for each word.
  std::string label_column = "label";
  /// A multi_label sample may have no label. For the other types, a sample without a label is
  /// skipped.
  ProblemType problem_type = ProblemType::single_label;
  /// For multi_label, instead of label_column: one column per label with 0 and 1 (or false and
  /// true). Its name is the label's name.
  std::vector<std::string> label_columns{};
  /// For multi_label without label_columns: the separator between a sample's labels.
  std::string label_separator{};
  /// '\0' selects tab for .tsv and .tab, else comma. Must be '\0' for JSON Lines.
  char delimiter = '\0';
  /// If false, columns are named by number: "0", "1", …. Must be true for JSON Lines, which have
  /// the names in each line.
  bool has_header = true;
  /// "column=value" keeps only samples whose field equals the value. Several filters must all hold.
  std::vector<std::string> filters{};
  /// Stops after this many samples that passed, in file order; 0 reads all.
  int64_t max_rows = 0;
  /// Samples are documents of a language model, unlabelled: a .txt file is text without columns, read by
  /// `sample_by`, and text_pair_column has the completion of a prompt.
  bool documents = false;
  SampleBy sample_by = SampleBy::line;
  /// Keeps samples with empty text, so that every sample gets an answer (prediction).
  bool keep_empty_text = false;
};

/// What a reader has counted so far.
struct TextRowCounts {
  int64_t rows_read = 0; // records seen, without the header
  int64_t filtered_out = 0; // records that a filter left out
  int64_t empty_text = 0; // records skipped for an empty or blank text
  int64_t empty_label = 0; // records skipped for an empty or blank label
};

/// Reads the samples of files that pass the filters, one by one, one file after the other. Each file
/// has its own header and format; its columns may be in another order. Memory: that of TextWindow, so
/// a regular file may be larger than memory.
class TextRowReader {
 public:
  /// Throws InputError as the files' readers do, and for an unknown column (the message lists the
  /// columns with one value each), a pair column that is the text column, a filter without "=", a
  /// delimiter or has_header=false with JSON Lines or CoNLL, or no file.
  TextRowReader(TextFiles files, const TextTableOptions& options);

  /// Moves to the next sample that passes. Returns false if there is none. Throws InputError as the
  /// constructor and the readers do, and for a prompt or completion that is empty.
  bool next();
  /// Text of the current sample. The views of text() and label() are valid until next().
  std::string_view text() const { return text_; }
  /// Second text of a pair; empty without text_pair_column.
  std::string_view text_pair() const {
    return pair_column_ ? records_->field(*pair_column_) : std::string_view();
  }
  /// Value of label_column, or of label_columns[column], without surrounding white space. Empty if
  /// there is no label column.
  std::string_view label(size_t column = 0) const;
  /// Line of its file at which the sample starts, from 1.
  int64_t line() const { return records_->line(); }
  /// "path:line".
  std::string position() const { return records_->position(); }
  const TextRowCounts& counts() const { return counts_; }
  /// Bytes of the files up to the end of the current sample, for progress.
  int64_t bytes_read() const { return before_ + static_cast<int64_t>(records_->bytes_read()); }

  /// Call it at the end of the files. Throws InputError if no sample passed. The message says how
  /// many samples each rule left out.
  void require_rows() const;

 private:
  void open();
  bool next_record();

  TextTableOptions options_;
  TextFiles files_;
  size_t file_ = 0; // the current one
  int64_t before_ = 0; // bytes of the earlier ones
  std::unique_ptr<RecordReader> records_{};
  size_t text_column_ = 0;
  std::optional<size_t> pair_column_{};
  std::vector<size_t> label_columns_{};
  std::vector<std::pair<size_t, std::string>> filters_{}; // column, value
  int64_t passed_ = 0;
  TextRowCounts counts_{};
  std::string_view text_{};
};

/// The columns of documents where the user has named none: "prompt" and "completion" if the first file
/// has both or no "text", else "text". Throws InputError for a file of conversations ("messages"), which
/// need a chat template, and as TextRowReader does.
TextTableOptions with_document_columns(const TextFiles& files, TextTableOptions options);

/// A sample of word_labels.
struct LabelledWords {
  std::vector<std::string> words{};
  std::vector<std::string> labels{}; // [word]; empty without a label column
};
/// The lists of the current sample. Throws InputError with file and line if a value is no list of
/// texts or numbers, or if the lists are not equally long.
LabelledWords read_labelled_words(const TextRowReader& reader, const TextTableOptions& options);

/// Distinct labels, sorted as numbers if all are integers, else by bytes. The index of a name is
/// its label number. "1.0" is "1" if both occur.
std::vector<std::string> distinct_labels(const std::vector<std::string>& labels);

/// Label number of each of `labels`; -1 if `names` lacks the label. "1.0" and "1" are one label, unless
/// `names` has both. If `names` are the placeholders
/// "LABEL_0", "LABEL_1", … of a model without names, label "1" has number 1.
std::vector<int64_t> label_numbers(const std::vector<std::string>& labels,
                                   const std::vector<std::string>& names);

} // namespace hasten
