// Reads sentences of words with tags: CoNLL files, and the lists of words in records.
// Threading: one reader per thread; free functions.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/text/text_file.h"

namespace hasten {

/// A CoNLL file: a word and its tags in each line, separated by tabs or, in a line without tabs, by
/// spaces. A record is a sentence; an empty line ends it. Lines that begin with "-DOCSTART-" are
/// skipped. The first column is named "tokens" and the last one "ner_tags", those between "1", "2", …
/// A field is the JSON text of a list, ["EU","rejects"], as in JSON Lines.
class ConllReader final : public RecordReader {
 public:
  /// Throws InputError with the file's name if it has no sentence.
  explicit ConllReader(std::shared_ptr<const TextFile> file);

  size_t column(std::string_view name, std::string_view flag = "column") override;
  /// Throws InputError with file and line for a line with another number of columns than the
  /// first, and for invalid UTF-8.
  bool next() override;
  std::string_view field(size_t column) const override { return fields_[column]; }

 private:
  /// The columns of the next line with a word; empty at the end of a sentence or of the file.
  std::vector<std::string_view> next_word();

  std::vector<std::string> samples_{}; // [column] of the first sentence, for messages
  std::vector<std::string> fields_{}; // [column]
  int64_t last_line_ = 0; // read so far; line() is that of the sentence
  bool at_end_ = false;
};

/// The elements of a JSON list of texts or integers, such as a field of a record. Throws InputError
/// that names `position` and `column` for anything else.
std::vector<std::string> read_word_list(std::string_view json, const std::string& position,
                                        const std::string& column);

} // namespace hasten
