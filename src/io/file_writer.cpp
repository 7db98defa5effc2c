#include "file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "hasten/base/files.h"
#include "hasten/base/temporary_file.h"

namespace hasten::detail {

constexpr const char* kFileWriterWhere = "io::write_file";

FileWriter::FileWriter(std::filesystem::path path)
    : path_(std::move(path)), fd_(open_temporary(path_, temporary_)) {
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
  if (const int error = write_all(fd_, bytes)) {
    throw_file_error(kFileWriterWhere, path_, error);
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
