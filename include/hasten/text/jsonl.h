// Streaming reader of JSON Lines: one JSON object per line, UTF-8.
//
// The reader skips a byte-order mark and blank lines. The keys of the first object are the columns.
// Every object must have the keys that column() selected; its other keys may differ. Values become
// text: a string stays as it is, a number is written as in JSON ("1", "0.5"), true and false become
// their names, and null becomes an empty text.
//
// Threading: one reader per thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/text/text_file.h"

namespace hasten {

class JsonlReader {
 public:
  /// Reads the first object. Throws InputError if the file is empty, or as next() does.
  explicit JsonlReader(std::shared_ptr<const TextFile> file);

  /// Keys of the first object, sorted.
  const std::vector<std::string>& columns() const { return columns_; }

  /// Selects key `name`: from now on next() reads its value. Returns its index for field(). Throws
  /// InputError if the first object lacks the key. The message lists the object's keys with their
  /// values, the most similar name, and `flag`: the option by which the user gave the name.
  size_t column(std::string_view name, std::string_view flag = "column");

  /// Moves to the next object. Returns false at the end of the file.
  /// Throws InputError with path:line, and the byte in the line and in the file, if a line is not a
  /// JSON object or not UTF-8. Throws InputError with path:line and the key if an object lacks a
  /// selected key or has an array or object there.
  bool next();

  /// Value of a column in the current object, as text. The view is valid until the next next().
  std::string_view field(size_t column) const { return fields_[column]; }

  /// Line of the current object, counted from 1.
  int64_t line() const { return line_; }
  /// "path:line" of the current object.
  std::string position() const;
  /// Bytes of the file up to the end of the current record.
  size_t bytes_read() const { return window_.begin() + next_; }
  const std::filesystem::path& path() const { return window_.file().path(); }

 private:
  bool find_line(std::string_view& line);
  nlohmann::json parse(std::string_view line) const;

  TextWindow window_;
  size_t next_ = 0; // where the next line starts, in bytes of the window
  int64_t line_ = 0;
  std::vector<std::string> columns_{};
  std::vector<std::string> samples_{}; // the first object's values [column]
  std::vector<std::string> wanted_{}; // keys that column() selected
  std::vector<std::string> fields_{}; // [wanted]
};

} // namespace hasten
