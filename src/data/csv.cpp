#include "hasten/data/csv.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/data/utf8.h"

namespace hasten {

namespace detail {

constexpr const char* kCsvReader = "data::CsvReader";

char csv_delimiter(const std::filesystem::path& path, char given) {
  if (given == '"' || given == '\n' || given == '\r') {
    throw InputError(
        kCsvReader,
        "delimiter=" + byte_name(given),
        "a character that is neither a quote nor a line break",
        "pass a comma, a semicolon or a tab");
  }
  if (given != '\0') {
    return given;
  }
  const auto extension = path.extension();
  return extension == ".tsv" || extension == ".tab" ? '\t' : ',';
}

// At most `limit` characters of a value for a message, line breaks as spaces.
std::string csv_sample(std::string_view value, size_t limit = 40) {
  std::string sample;
  size_t characters = 0;
  for (const char c : value) {
    if ((static_cast<unsigned char>(c) & 0xC0) != 0x80 &&
        ++characters > limit) {
      return sample + "...";
    }
    sample += c == '\n' || c == '\r' || c == '\t' ? ' ' : c;
  }
  return sample;
}

[[noreturn]] void fail_csv_file(
    const std::filesystem::path& path,
    const std::string& reason,
    const char* expected,
    const char* fix = "") {
  throw InputError(
      kCsvReader, "file=" + path.string() + " " + reason, expected, fix);
}

} // namespace detail

// The bytes of a file: mapped where it is a regular one, read at once otherwise.
class CsvReader::Bytes {
 public:
  explicit Bytes(const std::filesystem::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
      detail::fail_csv_file(
          path,
          std::string("cannot be opened: ") + std::strerror(errno),
          "a file that exists and may be read");
    }
    struct stat status {};
    std::string problem;
    if (::fstat(file, &status) != 0) {
      problem = std::strerror(errno);
    } else if (S_ISDIR(status.st_mode)) {
      problem = "it is a folder";
    } else if (S_ISREG(status.st_mode) && status.st_size > 0) {
      map(file, static_cast<size_t>(status.st_size), problem);
    } else {
      drain(file, problem);
    }
    ::close(file);
    if (!problem.empty()) {
      detail::fail_csv_file(path, "cannot be read: " + problem, "a text file");
    }
  }
  ~Bytes() {
    if (mapped_ != nullptr) {
      ::munmap(mapped_, size_);
    }
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::string_view view() const {
    return mapped_ != nullptr
               ? std::string_view(static_cast<const char*>(mapped_), size_)
               : std::string_view(read_);
  }

 private:
  void map(int file, size_t size, std::string& problem) {
    void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    if (memory == MAP_FAILED) {
      problem = std::strerror(errno);
      return;
    }
    ::madvise(memory, size, MADV_SEQUENTIAL);
    mapped_ = memory;
    size_ = size;
  }
  void drain(int file, std::string& problem) {
    char buffer[1 << 16];
    for (;;) {
      const ssize_t count = ::read(file, buffer, sizeof(buffer));
      if (count > 0) {
        read_.append(buffer, static_cast<size_t>(count));
      } else if (count == 0) {
        return;
      } else if (errno != EINTR) {
        problem = std::strerror(errno);
        return;
      }
    }
  }

  void* mapped_ = nullptr;
  size_t size_ = 0;
  std::string read_{};
};

CsvReader::CsvReader(std::filesystem::path path, CsvOptions options)
    : path_(std::move(path)),
      delimiter_(detail::csv_delimiter(path_, options.delimiter)),
      bytes_(std::make_shared<const Bytes>(path_)),
      text_(bytes_->view()) {
  if (text_.substr(0, 2) == "\xFF\xFE" || text_.substr(0, 2) == "\xFE\xFF") {
    detail::fail_csv_file(
        path_,
        "starts with the byte-order mark of UTF-16",
        "UTF-8",
        "save it as UTF-8, for example with iconv -f UTF-16 -t UTF-8");
  }
  if (text_.substr(0, 3) == "\xEF\xBB\xBF") {
    next_ = 3;
  }
  cr_ends_lines_ = text_.find('\n') == std::string_view::npos;
  if (!read_record()) {
    detail::fail_csv_file(path_, "is empty", "records of text");
  }
  for (size_t i = 0; i < fields_.size(); ++i) {
    columns_.push_back(
        options.has_header ? std::string(trimmed(fields_[i]))
                           : std::to_string(i));
  }
  pending_ = !options.has_header;
}

CsvReader::~CsvReader() = default;
CsvReader::CsvReader(CsvReader&&) noexcept = default;
CsvReader& CsvReader::operator=(CsvReader&&) noexcept = default;

size_t CsvReader::column(std::string_view name, std::string_view flag) const {
  const auto found = std::find(columns_.begin(), columns_.end(), name);
  const std::string asked = std::string(flag) + "=" + std::string(name);
  if (found != columns_.end()) {
    if (std::find(found + 1, columns_.end(), name) != columns_.end()) {
      throw InputError(
          detail::kCsvReader,
          asked + " is the name of two columns of " + path_.string(),
          "one column of that name",
          "rename one of them in the file");
    }
    return static_cast<size_t>(found - columns_.begin());
  }
  std::vector<std::string> samples(columns_.size());
  try {
    CsvReader ahead(*this);
    if (ahead.next()) {
      for (size_t i = 0; i < columns_.size(); ++i) {
        samples[i] = detail::csv_sample(ahead.fields()[i]);
      }
    }
  } catch (const InputError&) {
    // The unknown column is said first; the record's own error comes when the
    // file is read.
  }
  std::string list;
  for (size_t i = 0; i < columns_.size(); ++i) {
    list += (i == 0 ? "" : ", ") + columns_[i] + " (\"" + samples[i] + "\")";
  }
  const std::string near =
      nearest_name(name, columns_.data(), columns_.data() + columns_.size());
  throw InputError(
      detail::kCsvReader,
      asked + " is not a column of " + path_.string(),
      "one of: " + list,
      near.empty() ? "" : "did you mean " + near + "?");
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

// Length of the line break at `at`, 0 where there is none. A lone CR is text in a
// file whose lines end with LF: some writers leave it unquoted.
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

// Line breaks in [begin, end); `last` becomes the place behind the last one.
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

// Where a field may end: the delimiter, a line break, or the end of the file.
bool CsvReader::at_field_end(size_t at) const {
  return at == text_.size() || text_[at] == delimiter_ || line_break(at) > 0;
}

// Whether the quote at `at` opens a field that closes before the line ends: only
// then is it a quote in a tab-separated file.
bool CsvReader::closes_on_its_line(size_t at) const {
  for (size_t i = at + 1; i < text_.size() && text_[i] != '\n'; ++i) {
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

// Reads the quoted field whose opening quote is at `at`; leaves `at` behind the
// closing one.
void CsvReader::read_quoted(size_t& at) {
  const size_t open = at;
  size_t begin = at + 1;
  std::string* unescaped = nullptr;
  for (;;) {
    const size_t quote = text_.find('"', at + 1);
    if (quote == std::string_view::npos) {
      fail(
          open,
          "a quote opens here and is never closed",
          "a closing quote before the end of the file",
          "close it, or double quotes that are part of the text");
    }
    at = quote + 1;
    const bool doubled = at < text_.size() && text_[at] == '"';
    if (!doubled && unescaped == nullptr) {
      fields_.push_back(text_.substr(begin, quote - begin));
      break;
    }
    if (unescaped == nullptr) {
      if (unescaped_used_ == unescaped_.size()) {
        unescaped_.emplace_back();
      }
      unescaped = &unescaped_[unescaped_used_++];
      unescaped->clear();
    }
    unescaped->append(text_.substr(begin, quote - begin));
    if (!doubled) {
      fields_.push_back({}); // set by read_record: the vector may still grow
      break;
    }
    unescaped->push_back('"');
    begin = at + 1;
  }
  if (!at_field_end(at)) {
    fail(
        at,
        "text follows a closing quote",
        "a delimiter or the end of the line",
        "double quotes that are part of a quoted text");
  }
}

bool CsvReader::read_record() {
  while (const size_t bytes = line_break(next_)) {
    next_ += bytes;
    ++next_line_;
  }
  if (next_ == text_.size()) {
    return false;
  }
  start_ = next_;
  line_ = next_line_;
  fields_.clear();
  unescaped_used_ = 0;
  std::vector<size_t> unescaped_fields; // [unescaped] its field
  size_t at = next_;
  for (;;) {
    const size_t begin = at;
    if (at < text_.size() && text_[at] == '"' &&
        (delimiter_ != '\t' || closes_on_its_line(at))) {
      const size_t used = unescaped_used_;
      read_quoted(at);
      if (unescaped_used_ > used) {
        unescaped_fields.push_back(fields_.size() - 1);
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
  for (size_t i = 0; i < unescaped_fields.size(); ++i) {
    fields_[unescaped_fields[i]] = unescaped_[i];
  }
  check_text(start_, at);
  size_t behind = 0;
  next_line_ += count_lines(start_, at, behind);
  if (const size_t bytes = line_break(at)) {
    at += bytes;
    ++next_line_;
  }
  next_ = at;
  return true;
}

void CsvReader::check_text(size_t begin, size_t end) const {
  const auto record = text_.substr(begin, end - begin);
  if (const size_t bad = invalid_utf8_position(record);
      bad != std::string_view::npos) {
    fail(
        begin + bad,
        "invalid UTF-8: " + byte_name(record[bad]) + " at offset " +
            std::to_string(begin + bad) + " of the file",
        "UTF-8",
        "convert the file, for example with iconv -f WINDOWS-1252 -t UTF-8");
  }
  if (const size_t nul = record.find('\0'); nul != std::string_view::npos) {
    fail(
        begin + nul,
        "a NUL byte at offset " + std::to_string(begin + nul) + " of the file",
        "text",
        "check that the file is text and not cut or padded");
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
  throw InputError(
      detail::kCsvReader,
      position() + ": the record has fields=" + std::to_string(fields_.size()) +
          ", starting with \"" + detail::csv_sample(fields_[0]) + "\"",
      std::to_string(columns_.size()) +
          " fields, as in the file's first record",
      fix);
}

std::string CsvReader::position() const {
  return path_.string() + ":" + std::to_string(line_);
}

// Names the physical line and the character in it of byte `at`, and the line the
// record starts at where that is another one.
void CsvReader::fail(
    size_t at,
    std::string_view what,
    std::string_view expected,
    std::string_view fix) const {
  size_t line_begin = start_;
  const int64_t line = line_ + count_lines(start_, at, line_begin);
  const size_t column =
      utf8_length(text_.substr(line_begin, at - line_begin)) + 1;
  std::string where = path_.string() + ":" + std::to_string(line) + ":" +
                      std::to_string(column);
  if (line != line_) {
    where += " (record from line " + std::to_string(line_) + ")";
  }
  throw InputError(
      detail::kCsvReader, where + ": " + std::string(what), expected, fix);
}

std::string csv_field(std::string_view value, char delimiter) {
  const char special[] = {'"', '\n', '\r', delimiter};
  const bool blank_end =
      !value.empty() && (value.front() == ' ' || value.back() == ' ');
  if (!blank_end && value.find_first_of(std::string_view(special, 4)) ==
                        std::string_view::npos) {
    return std::string(value);
  }
  std::string field = "\"";
  for (const char c : value) {
    field += c;
    if (c == '"') {
      field += c;
    }
  }
  return field + "\"";
}

} // namespace hasten
