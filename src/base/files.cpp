#include "hasten/base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/temporary_file.h"

namespace hasten {

namespace detail {

/// "path: No such file or directory".
std::string path_problem(const std::filesystem::path& path, int error) {
  return path.string() + ": " + std::generic_category().message(error);
}

void throw_file_error(const char* where, const std::filesystem::path& path, int error) {
  switch (error) {
    case EACCES:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ENOENT:
    case ENOTDIR:
    case EPERM:
    case EROFS:
      throw InputError(where, path_problem(path, error));
    default:
      const ErrorKind kind = kind_of_errno(error);
      throw Error(where, path_problem(path, error), {},
                  kind == ErrorKind::full_disk ? "free space or write elsewhere" : "", kind);
  }
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  const auto folder = path.parent_path();
  return folder.empty() ? std::filesystem::path(".") : folder;
}

int write_all(int fd, std::string_view bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

int FileDescriptor::close() {
  const int fd = std::exchange(fd_, -1);
  return fd < 0 || ::close(fd) == 0 || errno == EINTR ? 0 : errno;
}

FileWriter::FileWriter(const char* where, std::filesystem::path path)
    : where_(where), path_(std::move(path)), file_(open_temporary(path_, temporary_)) {
  if (file_.get() < 0) {
    throw_file_error(where_, path_, errno);
  }
}

FileWriter::~FileWriter() {
  if (!finished_) {
    ::unlink(temporary_.c_str());
  }
}

void FileWriter::keep_permissions() const {
  struct stat old {};
  if (::stat(path_.c_str(), &old) == 0 && ::fchmod(file_.get(), old.st_mode & 07777) != 0) {
    throw_file_error(where_, path_, errno);
  }
}

void FileWriter::write(std::string_view bytes) const {
  if (const int error = write_all(file_.get(), bytes); error != 0) {
    throw_file_error(where_, path_, error);
  }
}

void FileWriter::finish() {
  // EINVAL: the file system cannot sync such a file.
  int error = ::fsync(file_.get()) == 0 || errno == EINVAL ? 0 : errno;
  if (error == 0) {
    error = file_.close();
  }
  if (error == 0 && ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    error = errno;
  }
  if (error != 0) {
    throw_file_error(where_, path_, error);
  }
  finished_ = true;
  sync_path(folder_of(path_));
}

/// The target of symbolic links, so that the target is replaced and not the link.
std::filesystem::path link_target(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_symlink(path, ignored)) {
    return path;
  }
  const auto target = std::filesystem::weakly_canonical(path, ignored);
  return ignored ? path : target;
}

} // namespace detail

std::string read_file(const std::filesystem::path& path) {
  constexpr const char* kWhere = "base::read_file";
  const detail::FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    throw InputError(kWhere, detail::path_problem(path, errno));
  }
  // The size is a hint: /proc reports 0, and a file may grow while it is read.
  std::string bytes;
  bytes.resize(static_cast<size_t>(status.st_size) + 1);
  size_t size = 0;
  while (true) {
    const ssize_t got = ::read(file.get(), bytes.data() + size, bytes.size() - size);
    if (got < 0) {
      if (errno == EINTR) {
        continue;
      }
      throw InputError(kWhere, detail::path_problem(path, errno));
    }
    if (got == 0) {
      break;
    }
    size += static_cast<size_t>(got);
    if (size == bytes.size()) {
      bytes.resize(std::max<size_t>(bytes.size() * 2, 4096));
    }
  }
  bytes.resize(size);
  return bytes;
}

void write_file_atomically(const std::filesystem::path& path, std::string_view bytes) {
  detail::FileWriter file("base::write_file_atomically", detail::link_target(path));
  file.keep_permissions();
  file.write(bytes);
  file.finish();
}

void sync_path(const std::filesystem::path& path) {
  constexpr const char* kWhere = "base::sync_path";
  const detail::FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    detail::throw_file_error(kWhere, path, errno);
  }
  // EINVAL: the file system cannot sync such a file (a folder on some network file systems).
  if (::fsync(file.get()) != 0 && errno != EINVAL) {
    detail::throw_file_error(kWhere, path, errno);
  }
}

std::string hash_hex(std::string_view bytes) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(bytes.data(), bytes.size())));
  return text;
}

} // namespace hasten
