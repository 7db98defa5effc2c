#include "hasten/text/csv.h"

#include <algorithm>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/text/utf8.h"

namespace hasten {

namespace detail {

constexpr const char* kCsvReader = "data::CsvReader";

char csv_delimiter(const std::filesystem::path& extension, char given) {
  if (given == '"' || given == '\n' || given == '\r') {
    throw InputError(kCsvReader, "delimiter=" + byte_name(given),
                     "a character that is neither a quote nor a line break",
                     "pass a comma, a semicolon or a tab");
  }
  if (given != '\0') {
    return given;
  }
  return extension == ".tsv" || extension == ".tab" ? '\t' : ',';
}

bool lacks_line_feeds(TextWindow window) {
  while (window.text().find('\n') == std::string_view::npos) {
    if (window.reaches_end()) {
      return true;
    }
    window.move(window.text().size());
  }
  return false;
}

} // namespace detail

CsvReader::CsvReader(const std::filesystem::path& path, CsvOptions options)
    : CsvReader(TextFile::open(path, detail::kCsvReader), options) {}

CsvReader::CsvReader(std::shared_ptr<const TextFile> file, CsvOptions options)
    : RecordReader(std::move(file)),
      delimiter_(detail::csv_delimiter(window_.file().extension(), options.delimiter)),
      text_(window_.text()) {
  cr_ends_lines_ = detail::lacks_line_feeds(window_);
  skip_separator_line(options.delimiter);
  if (!read_record()) {
    throw InputError(detail::kCsvReader, "file=" + path().string() + " is empty",
                     "records of text");
  }
  for (size_t i = 0; i < fields_.size(); ++i) {
    columns_.push_back(options.has_header ? std::string(trimmed(fields_[i])) : std::to_string(i));
  }
  pending_ = !options.has_header;
}

size_t CsvReader::column(std::string_view name, std::string_view flag) {
  const auto found = std::ranges::find(columns_, name);
  const std::string asked = std::string(flag) + "=" + std::string(name);
  if (found != columns_.end()) {
    if (std::find(found + 1, columns_.end(), name) != columns_.end()) {
      throw InputError(detail::kCsvReader,
                       asked + " is the name of two columns of " + path().string(),
                       "one column of that name", "rename one of them in the file");
    }
    return static_cast<size_t>(found - columns_.begin());
  }
  const auto shown = [](char delimiter) {
    return delimiter == '\t' ? std::string("tab") : std::string("'") + delimiter + "'";
  };
  for (const char delimiter : {';', '\t', '|', ','}) {
    if (columns_.size() == 1 && columns_[0].find(delimiter) != std::string::npos) {
      throw InputError(detail::kCsvReader,
                       asked + " is not a column of " + path().string() + ":" +
                           std::to_string(line_) + ", whose only column is \"" +
                           sample(columns_[0]) + "\"",
                       "columns with the delimiter " + shown(delimiter_),
                       "name the delimiter: --delimiter " + shown(delimiter));
    }
  }
  std::vector<std::string> samples(columns_.size());
  try {
    CsvReader ahead(*this);
    if (ahead.next()) {
      samples.assign(ahead.fields().begin(), ahead.fields().end());
    }
  } catch (const InputError&) {
    // Report the unknown column first. Reading the file reports the record's own error.
  }
  fail_unknown_column(detail::kCsvReader, asked, samples);
}

bool CsvReader::next() {
  if (pending_) {
    pending_ = false;
    return true;
  }
  if (!read_record()) {
    return false;
  }
  check_width();
  return true;
}

// Excel names the delimiter in a first line: sep=;
void CsvReader::skip_separator_line(char given) {
  const std::string_view start = text_.substr(next_);
  const size_t quote = start.starts_with('"') ? 1 : 0;
  const size_t end = next_ + 5 + 2 * quote;
  if (start.substr(quote).starts_with("sep=") && end < text_.size() && line_break(end) > 0 &&
      (quote == 0 || text_[end - 1] == '"')) {
    delimiter_ = given == '\0' ? detail::csv_delimiter({}, text_[end - 1 - quote]) : given;
    next_ = end + line_break(end);
    ++next_line_;
  }
}

// Length of the line break at `at`, or 0. A lone CR is text in a file whose lines end with LF,
// because some writers do not quote it.
size_t CsvReader::line_break(size_t at) const {
  if (at >= text_.size()) {
    return 0;
  }
  if (text_[at] == '\n') {
    return 1;
  }
  if (text_[at] != '\r') {
    return 0;
  }
  if (at + 1 < text_.size() && text_[at + 1] == '\n') {
    return 2;
  }
  return cr_ends_lines_ || at + 1 == text_.size() ? 1 : 0;
}

// Counts the line breaks in [begin, end). Sets `last` to the position after the last one.
int64_t CsvReader::count_lines(size_t begin, size_t end, size_t& last) const {
  int64_t lines = 0;
  for (size_t i = begin; i < end;) {
    const size_t bytes = line_break(i);
    if (bytes > 0) {
      ++lines;
      last = i + bytes;
    }
    i += std::max<size_t>(bytes, 1);
  }
  return lines;
}

// Whether a field may end here: at the delimiter, a line break or the end of the file.
bool CsvReader::at_field_end(size_t at) const {
  return at == text_.size() || text_[at] == delimiter_ || line_break(at) > 0;
}

// Whether the quote at `at` opens a field that closes on the same line. Only then is it a quote in
// a tab-separated file.
bool CsvReader::closes_on_its_line(size_t at) const {
  for (size_t i = at + 1; i < text_.size() && line_break(i) == 0; ++i) {
    if (text_[i] == '"') {
      if (i + 1 < text_.size() && text_[i + 1] == '"') {
        ++i;
      } else {
        return at_field_end(i + 1);
      }
    }
  }
  return false;
}

// Reads the quoted field whose opening quote is at `at` and sets `at` after the closing one.
// Returns false if the window ends first.
bool CsvReader::read_quoted(size_t& at) {
  const size_t open = at++;
  bool doubled = false;
  for (;; doubled = true) {
    at = text_.find('"', at);
    if (at == std::string_view::npos) {
      if (!window_.reaches_end()) {
        return false;
      }
      fail(open, "a quote opens here and is never closed",
           "a closing quote before the end of the file",
           "close it, or double quotes that are part of the text");
    }
    ++at;
    if (at == text_.size() || text_[at] != '"') {
      break;
    }
    ++at;
  }
  std::string_view field = text_.substr(open + 1, at - open - 2);
  if (doubled) {
    auto& text = unescaped_.emplace_front();
    text.reserve(field.size());
    for (size_t i = 0; i < field.size(); i += field[i] == '"' ? 2 : 1) {
      text += field[i];
    }
    field = text;
  }
  fields_.push_back(field);
  if (!at_field_end(at)) {
    fail(at, "text follows a closing quote", "a delimiter or the end of the line",
         "double quotes that are part of a quoted text");
  }
  return true;
}

bool CsvReader::read_record() {
  while (!read_record_in_window()) {
    window_.move(next_);
    next_ = 0;
    text_ = window_.text();
  }
  return !fields_.empty();
}

// Whether the data up to `end` is complete. A CR at the window's end may have its LF after it.
bool CsvReader::is_whole(size_t end) const { return end < text_.size() || window_.reaches_end(); }

// Returns false if the record may continue after the window. No fields mean the end of the file.
bool CsvReader::read_record_in_window() {
  fields_.clear();
  size_t bytes = 0;
  while ((bytes = line_break(next_)) > 0 && is_whole(next_ + bytes)) {
    next_ += bytes;
    ++next_line_;
  }
  if (bytes > 0 || next_ == text_.size()) {
    return window_.reaches_end();
  }
  start_ = next_;
  line_ = next_line_;
  unescaped_.clear();
  size_t at = next_;
  for (;;) {
    const size_t begin = at;
    if (at < text_.size() && text_[at] == '"' && (delimiter_ != '\t' || closes_on_its_line(at))) {
      if (!read_quoted(at)) {
        return false;
      }
    } else {
      while (!at_field_end(at)) {
        ++at;
      }
      fields_.push_back(text_.substr(begin, at - begin));
    }
    if (at == text_.size() || text_[at] != delimiter_) {
      break;
    }
    ++at;
  }
  bytes = line_break(at);
  if (!is_whole(at + bytes)) {
    return false;
  }
  check_text(start_, at);
  size_t behind = 0;
  next_line_ += count_lines(start_, at, behind);
  next_line_ += bytes > 0 ? 1 : 0;
  next_ = at + bytes;
  return true;
}

void CsvReader::check_text(size_t begin, size_t end) const {
  const auto record = text_.substr(begin, end - begin);
  if (const size_t bad = invalid_utf8_position(record); bad != std::string_view::npos) {
    fail(begin + bad,
         "invalid UTF-8: " + byte_name(record[bad]) + " at offset " +
             std::to_string(window_.begin() + begin + bad) + " of the file",
         "UTF-8", "convert the file, for example with iconv -f WINDOWS-1252 -t UTF-8");
  }
  if (const size_t nul = record.find('\0'); nul != std::string_view::npos) {
    fail(begin + nul,
         "a NUL byte at offset " + std::to_string(window_.begin() + begin + nul) + " of the file",
         "text", "check that the file is text and not truncated or padded");
  }
}

void CsvReader::check_width() const {
  if (fields_.size() == columns_.size()) {
    return;
  }
  std::string fix = "quote fields that hold the delimiter or a line break";
  if (fields_.size() == 1 || columns_.size() == 1) {
    fix += ", or name the delimiter with --delimiter";
  }
  throw InputError(detail::kCsvReader,
                   position() + ": the record has fields=" + std::to_string(fields_.size()) +
                       ", starting with \"" + sample(fields_[0]) + "\"",
                   std::to_string(columns_.size()) + " fields, as in the file's first record", fix);
}

// Reports the physical line and the character of byte `at`, and the line where the record starts if
// that is a different one.
void CsvReader::fail(size_t at, std::string_view what, std::string_view expected,
                     std::string_view fix) const {
  size_t line_begin = start_;
  const int64_t line = line_ + count_lines(start_, at, line_begin);
  const size_t column = utf8_length(text_.substr(line_begin, at - line_begin)) + 1;
  std::string where = path().string() + ":" + std::to_string(line) + ":" + std::to_string(column);
  if (line != line_) {
    where += " (record from line " + std::to_string(line_) + ")";
  }
  throw InputError(detail::kCsvReader, where + ": " + std::string(what), expected, fix);
}

} // namespace hasten
