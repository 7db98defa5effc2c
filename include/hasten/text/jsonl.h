// Streaming reader of JSON Lines: one JSON object per line, UTF-8. A file that begins with [ is one
// array of such objects.
//
// The reader skips a byte-order mark and blank lines. The keys of the first object are the columns.
// Every object must have the keys that column() selected; its other keys may differ. Values become
// text: a string stays as it is, a number is written as in JSON ("1", "0.5"), true and false become
// their names, and null becomes an empty text.
//
// Threading: one reader per thread.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/text/text_file.h"

namespace hasten {

class JsonlReader final : public RecordReader {
 public:
  /// Reads the first object. `lists`: a value may be an array, whose field is its JSON text. Throws
  /// InputError if the file is empty, or as next() does.
  explicit JsonlReader(std::shared_ptr<const TextFile> file, bool lists = false);

  /// The columns are the keys of the first object, sorted. column() selects a key: from now on
  /// next() reads its value.
  size_t column(std::string_view name, std::string_view flag = "column") override;

  /// Throws InputError with path:line, and the byte in the line and in the file, if a line is not a
  /// JSON object or not UTF-8. Throws InputError with path:line and the key if an object lacks a
  /// selected key or has an object there, or an array without `lists`.
  bool next() override;

  std::string_view field(size_t column) const override { return fields_[column]; }

 private:
  char byte_at(size_t offset);
  bool find_element(std::string_view& element);
  bool find_line(std::string_view& line);
  nlohmann::json parse(std::string_view line) const;

  bool lists_;
  bool array_ = false; // the file is one
  bool in_array_ = false; // its first byte is read
  int64_t next_line_ = 1; // of the byte at next_, in an array
  std::vector<std::string> samples_{}; // the first object's values [column]
  std::vector<std::string> wanted_{}; // keys that column() selected
  std::vector<std::string> fields_{}; // [wanted]
};

} // namespace hasten
