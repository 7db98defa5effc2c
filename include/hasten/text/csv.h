// Streaming reader of delimited text: CSV as in RFC 4180, and TSV.
//
// A first line "sep=;" names the delimiter, as in Excel's files.
// A record ends with LF or CRLF, or with CR if the file has no LF. The reader skips a byte-order
// mark and empty lines. A field that starts with a quote ends at the next quote that is not
// doubled. It may contain delimiters and line breaks. A quote anywhere else in a field is an
// ordinary character. Tab-separated files are mostly written without quoting. There a leading quote
// counts only if a quote on the same line, just before a tab or the line's end, closes it.
// Otherwise it is text. Every record must have as many fields as the first one.
//
// Threading: one reader per thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <forward_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/text/text_file.h"

namespace hasten {

struct CsvOptions {
  /// '\0' chooses by the file: its line "sep=;", or its name: tab for .tsv and .tab, comma for others.
  char delimiter = '\0';
  /// The first record has the names of the columns. If false, the columns are named by their
  /// number: "0", "1", ….
  bool has_header = true;
};

class CsvReader final : public RecordReader {
 public:
  /// Opens the file and reads the header.
  /// Throws InputError if the file is missing, a folder, empty or UTF-16, or if the delimiter is a
  /// quote or a line break.
  explicit CsvReader(const std::filesystem::path& path, CsvOptions options = {});
  /// Reads an open file. Several readers may read the same TextFile.
  explicit CsvReader(std::shared_ptr<const TextFile> file, CsvOptions options = {});
  CsvReader(CsvReader&&) noexcept = default;
  CsvReader& operator=(CsvReader&&) noexcept = default;

  /// Also throws InputError if two columns have this name.
  size_t column(std::string_view name, std::string_view flag = "column") override;

  /// Throws InputError with path:line and the column (in characters) if the record has another
  /// number of fields than the first, an unterminated quote, text after a closing quote, invalid
  /// UTF-8 or a NUL byte.
  bool next() override;

  /// Fields of the current record without their quotes, by column index. The views are valid until
  /// the next call of next().
  const std::vector<std::string_view>& fields() const { return fields_; }
  std::string_view field(size_t column) const override { return fields_[column]; }

 private:
  CsvReader(const CsvReader&) = default; // to look ahead
  void skip_separator_line(char given);
  bool read_record();
  bool read_record_in_window();
  bool is_whole(size_t end) const;
  bool read_quoted(size_t& at);
  bool closes_on_its_line(size_t at) const;
  size_t line_break(size_t at) const;
  int64_t count_lines(size_t begin, size_t end, size_t& last) const;
  bool at_field_end(size_t at) const;
  void check_text(size_t begin, size_t end) const;
  void check_width() const;
  [[noreturn]] void fail(size_t at, std::string_view what, std::string_view expected,
                         std::string_view fix) const;

  char delimiter_ = ',';
  bool cr_ends_lines_ = false;
  std::string_view text_{}; // the window's text; the offsets below refer to it
  int64_t next_line_ = 1;
  size_t start_ = 0; // where the current record starts, in bytes
  std::vector<std::string_view> fields_{};
  std::forward_list<std::string> unescaped_{}; // fields that held doubled quotes
  bool pending_ = false; // next() must return the record that the constructor has read
};

} // namespace hasten
