// A file to which a thread appends records.
#pragma once

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

#include "hasten/base/files.h"

namespace hasten::detail {

/// Threading: one thread calls it.
class RecordFile {
 public:
  /// Makes the folder and opens the file, at its end. Throws as throw_file_error() does.
  RecordFile(const char* where, std::filesystem::path path);
  ~RecordFile() { stop(); }
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  /// Does nothing for an empty record. Waits while the queue is full, up to ten seconds. Throws the error of an earlier write.
  /// Does nothing after finish().
  void add(std::string record);
  /// Returns when all records are written, and closes the file. Throws the error of a write. A
  /// second call does nothing.
  void finish();

 private:
  void stop();
  void run();
  /// 0, or errno.
  int write(const std::string& record) const;

  const char* where_;
  const std::filesystem::path path_;
  FileDescriptor file_;
  std::mutex mutex_{};
  std::condition_variable changed_{};
  std::deque<std::string> queue_{}; // under mutex_
  int error_ = 0; // errno of a write; under mutex_
  bool ends_ = false; // under mutex_
  std::thread thread_{};
};

} // namespace hasten::detail
