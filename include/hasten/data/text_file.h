// The bytes of an input file, or of a text that stands in for one.
// A regular file is memory-mapped, so that it may be larger than memory; anything
// else (a pipe) is read at once, and can be read again from here.
// Threading: immutable once made. The file must not shrink while it is mapped.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace hasten {

class TextFile {
 public:
  /// `where` begins the error's message: "data::CsvReader".
  /// Throws InputError: the file is missing, a folder, unreadable or UTF-16.
  static std::shared_ptr<const TextFile> open(
      const std::filesystem::path& path, const char* where = "data::TextFile");
  /// `text` under a name that messages use; its ending says what it holds, like
  /// a file's.
  static std::shared_ptr<const TextFile> of_text(
      std::filesystem::path name, std::string text);

  ~TextFile();
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// All bytes. Valid as long as this object.
  std::string_view text() const;
  /// Bytes of the byte-order mark in front: 3 or 0.
  size_t mark_bytes() const;

 private:
  explicit TextFile(std::filesystem::path path);
  std::string map(int file, size_t size);
  std::string drain(int file);

  std::filesystem::path path_;
  void* mapped_ = nullptr;
  size_t size_ = 0; // of the mapping, in bytes
  std::string read_{};
};

} // namespace hasten
