// Streaming reader of JSON lines: one JSON object a line, UTF-8.
//
// A byte-order mark and blank lines are skipped. The keys of the first object are
// the columns; every object must have those that were asked for, others may differ.
// Values become text: a string as it is, a number as JSON writes it ("1", "0.5"),
// true and false by name, null as an empty text.
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

#include "hasten/data/text_file.h"

namespace hasten {

class JsonlReader {
 public:
  /// Reads the first object. Throws InputError: an empty file, and what next()
  /// throws.
  explicit JsonlReader(std::shared_ptr<const TextFile> file);

  /// Keys of the first object, sorted.
  const std::vector<std::string>& columns() const { return columns_; }

  /// From here on next() reads the value of that key; returns its number for
  /// field(). Throws InputError where the first object lacks it: lists its keys,
  /// each with its value, and the nearest name. `flag` is what the user said it
  /// with, for the message.
  size_t column(std::string_view name, std::string_view flag = "column");

  /// Moves to the next object; false at the end of the file.
  /// Throws InputError naming path:line, and the byte in the line and in the file,
  ///   for a line that is no JSON object or no UTF-8; path:line and the key where
  ///   an object lacks one that was asked for, or has an array or object there.
  bool next();

  /// Value of a column in the current object, as text. A view until next().
  std::string_view field(size_t column) const { return fields_[column]; }

  /// Line of the current object, counted from 1.
  int64_t line() const { return line_; }
  /// "path:line" of the current object.
  std::string position() const;
  /// Bytes of the file up to the end of the current record.
  size_t bytes_read() const { return window_.begin() + next_; }
  const std::filesystem::path& path() const { return file_->path(); }

 private:
  bool find_line(std::string_view& line);
  nlohmann::json parse(std::string_view line) const;

  std::shared_ptr<const TextFile> file_;
  TextWindow window_;
  size_t next_ = 0; // where the next line starts, in bytes of the window
  int64_t line_ = 0;
  std::vector<std::string> columns_{};
  std::vector<std::string> samples_{}; // the first object's values [column]
  std::vector<std::string> wanted_{}; // keys that were asked for
  std::vector<std::string> fields_{}; // [wanted]
};

} // namespace hasten
