// The bytes of an input file, or of a text that stands in for one.
// A regular file is read in pieces, so that it may be larger than memory; anything
// else (a pipe) is read at once, and can be read again from here. Nothing is mapped:
// a mapped file that shrinks ends the process by SIGBUS.
// Threading: TextFile is immutable once made; one TextWindow per thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace hasten {

class TextFile {
 public:
  /// `where` begins the error's message: "data::CsvReader".
  /// Throws InputError: the file is missing, a folder, unreadable, UTF-16, or of
  ///   a format that is not text (Parquet, Arrow, Excel, compressed), by its first
  ///   bytes.
  static std::shared_ptr<const TextFile> open(const std::filesystem::path& path,
                                              const char* where = "data::TextFile");
  /// `text` under a name that messages use; its ending says what it holds, like
  /// a file's.
  static std::shared_ptr<const TextFile> of_text(std::filesystem::path name, std::string text);

  ~TextFile();
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  size_t size() const { return size_; }
  /// Bytes of the byte-order mark in front: 3 or 0.
  size_t mark_bytes() const { return mark_bytes_; }

 private:
  friend class TextWindow;
  explicit TextFile(std::filesystem::path path);
  std::string drain(int file);
  void check_start(const char* where);
  void read(size_t at, char* to, size_t bytes) const;

  std::filesystem::path path_;
  int file_ = -1; // of a regular file
  size_t size_ = 0; // bytes, when it was opened
  int64_t changed_ns_ = 0; // its modification time then
  size_t mark_bytes_ = 0;
  std::string read_{}; // of all others
};

/// A part of a file that moves on through it, for readers whose records lie whole
/// in it. Copies move on their own.
/// Memory: 256 KiB, or twice the longest record.
class TextWindow {
 public:
  /// Begins at the file's start. Throws as move().
  explicit TextWindow(std::shared_ptr<const TextFile> file);

  const TextFile& file() const { return *file_; }
  /// Valid until the next move(), also that of a copy.
  std::string_view text() const { return text_; }
  /// Where text() begins, in bytes of the file.
  size_t begin() const { return begin_; }
  bool reaches_end() const { return begin_ + text_.size() == file_->size(); }

  /// Leaves out the first `bytes` of text() and reads on: twice what is left, and
  /// one piece at least. Throws InputError naming a file that shrank or changed
  /// since it was opened.
  void move(size_t bytes);
  /// The line that begins at `at` of text(), without its line feed; `at` is behind
  /// it then. False at the end of the file. Moves.
  bool next_line(size_t& at, std::string_view& line);

 private:
  std::shared_ptr<const TextFile> file_;
  std::shared_ptr<char[]> buffer_{};
  std::string_view text_{};
  size_t begin_ = 0;
};

} // namespace hasten
