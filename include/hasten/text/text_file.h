// The bytes of an input file, or of a text in place of a file.
// A regular file is read in pieces, so it may be larger than memory. Other files (a pipe) are read
// into memory when they are opened, so they can be read more than once. A gzip file is the text in
// it: opening unpacks it into a file without a name in TMPDIR, or else /tmp. Nothing is mapped, because
// a mapped file that shrinks ends the process by SIGBUS.
// Threading: TextFile is immutable once made; one TextWindow per thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hasten/base/files.h"

namespace hasten {

class TextFile {
 public:
  /// `where` begins the error's message: "data::CsvReader".
  /// Throws InputError if the file is missing, a folder, unreadable or UTF-16, or if its first
  /// bytes show a format that is not text (Parquet, Arrow, Excel, zstd), or a gzip file that is cut
  /// off or damaged, with the byte. Throws Error if there is no space to unpack a gzip file.
  static std::shared_ptr<const TextFile> open(const std::filesystem::path& path,
                                              const char* where = "data::TextFile");
  /// Makes a TextFile from `text`. Messages use `name`. Its extension selects the format, as for a
  /// file.
  static std::shared_ptr<const TextFile> of_text(std::filesystem::path name, std::string text);

  const std::filesystem::path& path() const { return path_; }
  /// Selects the format: ".jsonl" of "a.jsonl" and of "a.jsonl.gz".
  std::filesystem::path extension() const {
    return (path_.extension() == ".gz" ? path_.stem() : path_).extension();
  }
  /// Bytes of the text.
  size_t size() const { return size_; }
  /// Bytes of the byte-order mark at the start: 3 or 0.
  size_t mark_bytes() const { return mark_bytes_; }

  /// The whole content, if it is in memory: of a pipe or of of_text().
  std::optional<std::string_view> content() const {
    return file_.get() < 0 ? std::optional<std::string_view>(read_) : std::nullopt;
  }
  /// Copies bytes [at, at + bytes) to `to`; at + bytes <= size(). Throws InputError with the file's
  /// name if the file has changed since it was opened.
  void read(size_t at, char* to, size_t bytes) const;

 private:
  explicit TextFile(std::filesystem::path path);
  void check_start(const char* where);
  void unpack(const char* where);

  std::filesystem::path path_;
  detail::FileDescriptor file_{}; // a regular file, or what unpack() wrote
  bool unpacked_ = false;
  size_t size_ = 0; // bytes, when it was opened
  int64_t changed_ns_ = 0; // modification time at that moment
  size_t mark_bytes_ = 0;
  std::string read_{}; // content of all other files
};

/// The files that `names` means: the file of this name if it exists, else those of the names between
/// its commas, in order. A name that does not exist and has *, ? or [ is a pattern (glob(7)): all
/// that match, in the order of their bytes. Other names need not exist. Needs no LibTorch. Throws
/// InputError "[where] flag=names" for a pattern without a match.
std::vector<std::filesystem::path> matching_files(const std::string& names,
                                                  const std::string& where,
                                                  const std::string& flag);

/// Files that are read one after the other.
struct TextFiles : std::vector<std::shared_ptr<const TextFile>> {
  using vector::vector;
  TextFiles() = default;
  /// One file; none if it is null.
  TextFiles(std::shared_ptr<const TextFile> file) { // NOLINT: implicit
    resize(file == nullptr ? 0 : 1, file);
  }
  /// Opens matching_files(). Throws as it and TextFile::open do.
  static TextFiles open(const std::string& names, const char* where, const std::string& flag);

  int64_t bytes() const;
  /// "a.csv, b.csv", for messages.
  std::string names() const;
};

/// A window that moves forward through a file, for readers that need a whole record in memory.
/// Copies move independently.
/// Memory: 256 KiB, or twice the longest record.
class TextWindow {
 public:
  /// Begins at the file's start. Throws as move() does.
  explicit TextWindow(std::shared_ptr<const TextFile> file);

  const TextFile& file() const { return *file_; }
  /// The bytes in the window. Valid until the next move() of this window.
  std::string_view text() const { return text_; }
  /// Offset of text() in the file, in bytes.
  size_t begin() const { return begin_; }
  bool reaches_end() const { return begin_ + text_.size() == file_->size(); }

  /// Drops the first `bytes` of text() and reads on, until the window has twice the rest and at
  /// least 256 KiB, or ends with the file. Throws InputError with the file's name if the file has
  /// changed since it was opened.
  void move(size_t bytes);
  /// Gets the line that begins at offset `at` of text(), without its line feed, and sets `at`
  /// to the byte after it. Returns false at the end of the file. May call move().
  bool next_line(size_t& at, std::string_view& line);

 private:
  std::shared_ptr<const TextFile> file_;
  std::shared_ptr<char[]> buffer_{};
  std::string_view text_{};
  size_t begin_ = 0;
};

/// Reads a file's records one by one: CsvReader, JsonlReader.
class RecordReader {
 public:
  virtual ~RecordReader() = default;

  /// Names of the columns. [column]
  const std::vector<std::string>& columns() const { return columns_; }
  /// Returns the index of the column `name` for field(). Throws InputError if there is none. The
  /// message lists the columns with their values in the next record, the most similar name, and
  /// `flag`: the option by which the user gave the name.
  virtual size_t column(std::string_view name, std::string_view flag = "column") = 0;
  /// Moves to the next record. Returns false at the end of the file.
  virtual bool next() = 0;
  /// Value of a column in the current record. The view is valid until the next next().
  virtual std::string_view field(size_t column) const = 0;

  /// Physical line at which the current record starts, counted from 1.
  int64_t line() const { return line_; }
  /// "path:line" of the current record.
  std::string position() const { return path().string() + ":" + std::to_string(line_); }
  /// Bytes of the file up to the end of the current record.
  size_t bytes_read() const { return window_.begin() + next_; }
  const std::filesystem::path& path() const { return window_.file().path(); }

 protected:
  explicit RecordReader(std::shared_ptr<const TextFile> file)
      : window_(std::move(file)), next_(window_.file().mark_bytes()) {}
  /// At most 40 characters of a value for a message, with spaces for line breaks.
  static std::string sample(std::string_view value);
  /// `given` is "flag=name"; `samples` has a value of each column.
  [[noreturn]] void fail_unknown_column(const char* where, const std::string& given,
                                        const std::vector<std::string>& samples) const;

  TextWindow window_;
  size_t next_; // where the next record starts, in bytes of the window
  int64_t line_ = 0;
  std::vector<std::string> columns_{};
};

} // namespace hasten
