#include "hasten/base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

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
    case EDQUOT:
    case EFBIG:
    case ENOSPC:
      throw Error(where, path_problem(path, error), {}, "free space or write elsewhere");
    default:
      throw Error(where, path_problem(path, error));
  }
}

/// Owns a descriptor. Only close_checked() reports errors of close.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  /// 0, or errno. Network file systems report a full disk only here.
  int close_checked() {
    const int fd = fd_;
    fd_ = -1;
    return ::close(fd) == 0 || errno == EINTR ? 0 : errno;
  }

 private:
  int fd_;
};

/// 0 or errno.
int write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
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

/// Writes, syncs and renames. Returns 0 or errno; `temporary` may then exist.
int write_and_rename(std::filesystem::path& temporary, const std::filesystem::path& target,
                     std::string_view bytes) {
  FileDescriptor file(open_temporary(target, temporary));
  if (file.get() < 0) {
    return errno;
  }
  struct stat old {};
  if (::stat(target.c_str(), &old) == 0 && ::fchmod(file.get(), old.st_mode & 07777) != 0) {
    return errno;
  }
  if (const int error = write_all(file.get(), bytes)) {
    return error;
  }
  if (::fsync(file.get()) != 0) {
    return errno;
  }
  if (const int error = file.close_checked()) {
    return error;
  }
  return ::rename(temporary.c_str(), target.c_str()) == 0 ? 0 : errno;
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
  constexpr const char* kWhere = "base::write_file_atomically";
  const std::filesystem::path target = detail::link_target(path);
  std::filesystem::path temporary;
  if (const int error = detail::write_and_rename(temporary, target, bytes)) {
    ::unlink(temporary.c_str());
    detail::throw_file_error(kWhere, path, error);
  }
  const auto folder = target.parent_path();
  sync_path(folder.empty() ? std::filesystem::path(".") : folder);
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
