// Writes a file in several parts and replaces the old file in one step.
#pragma once

#include <filesystem>
#include <string_view>

namespace hasten::detail {

/// Writes to "<path>.tmp-…". finish() syncs the file and renames it to `path`. Without finish()
/// nothing is left. Every function throws Error that names path and reason.
class FileWriter {
 public:
  explicit FileWriter(std::filesystem::path path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(std::string_view bytes);
  void finish();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_{};
  int fd_;
};

} // namespace hasten::detail
