#include "file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "hasten/base/files.h"

namespace hasten::detail {

constexpr const char* kFileWriterWhere = "io::write_file";

std::string unique_suffix() {
  static std::atomic<unsigned> counter{0};
  return std::to_string(::getpid()) + "-" +
         std::to_string(counter.fetch_add(1));
}

FileWriter::FileWriter(std::filesystem::path path)
    : path_(std::move(path)), temporary_(path_) {
  temporary_ += ".tmp-" + unique_suffix();
  fd_ =
      ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) {
    throw_file_error(kFileWriterWhere, path_, errno);
  }
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(temporary_.c_str());
  }
}

void FileWriter::write(std::string_view bytes) {
  while (!bytes.empty()) {
    // Linux writes at most 2 GiB - 4096 bytes a call.
    const size_t piece = std::min<size_t>(bytes.size(), size_t{1} << 30);
    const ssize_t written = ::write(fd_, bytes.data(), piece);
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      throw_file_error(kFileWriterWhere, path_, errno);
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void FileWriter::finish() {
  if (::fsync(fd_) != 0 && errno != EINVAL) {
    throw_file_error(kFileWriterWhere, path_, errno);
  }
  const int fd = fd_;
  fd_ = -1;
  // Network file systems report a full disk only here.
  int error = ::close(fd) == 0 || errno == EINTR ? 0 : errno;
  if (error == 0 && ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    error = errno;
  }
  if (error != 0) {
    ::unlink(temporary_.c_str());
    throw_file_error(kFileWriterWhere, path_, error);
  }
  const auto folder = path_.parent_path();
  sync_path(folder.empty() ? std::filesystem::path(".") : folder);
}

} // namespace hasten::detail
