#include "hasten/base/files.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

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
                  error == EFBIG                 ? "raise ulimit -f"
                  : kind == ErrorKind::full_disk ? "free space or write elsewhere"
                                                 : "",
                  kind);
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
    } else if (errno == EAGAIN) {
      pollfd ready{fd, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

int read_all(int fd, std::string& bytes, size_t hint) {
  // The size is a hint: /proc reports 0, and a file may grow while it is read.
  size_t size = bytes.size();
  bytes.resize(size + hint + 1);
  while (true) {
    const ssize_t got = ::read(fd, bytes.data() + size, bytes.size() - size);
    if (got == 0 || (got < 0 && errno != EINTR)) {
      bytes.resize(size);
      return got == 0 ? 0 : errno;
    }
    size += static_cast<size_t>(std::max<ssize_t>(got, 0));
    if (size == bytes.size()) {
      bytes.resize(std::max<size_t>(bytes.size() * 2, 4096));
    }
  }
}

ssize_t read_at(int fd, void* to, size_t count, size_t offset) noexcept {
  size_t done = 0;
  while (done < count) {
    const ssize_t got =
        ::pread(fd, static_cast<char*>(to) + done, count - done, static_cast<off_t>(offset + done));
    if (got == 0) {
      break;
    }
    if (got < 0 && errno != EINTR) {
      return -1;
    }
    done += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  return static_cast<ssize_t>(done);
}

int FileDescriptor::close() {
  const int fd = std::exchange(fd_, -1);
  return fd < 0 || ::close(fd) == 0 || errno == EINTR ? 0 : errno;
}

FileWriter::FileWriter(const char* where, std::filesystem::path path)
    : where_(where), path_(std::move(path)) {
  struct stat old {};
  if (::stat(path_.c_str(), &old) == 0 && !S_ISREG(old.st_mode) && !S_ISDIR(old.st_mode)) {
    // finish() would replace the device itself by a file.
    throw InputError(where_, path_.string() + " is a device or a pipe", "the path of a file");
  }
  const int error = make_beside(path_, ".tmp-", temporary_, [this](const auto& name) {
    file_ = FileDescriptor(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    return file_.get() < 0 ? errno : 0;
  });
  if (error != 0) {
    throw_file_error(where_, path_, error);
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
  std::string bytes;
  if (const int error = detail::read_all(file.get(), bytes, static_cast<size_t>(status.st_size));
      error != 0) {
    throw InputError(kWhere, detail::path_problem(path, error));
  }
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
  return format_hex(XXH3_64bits(bytes.data(), bytes.size()));
}

int make_beside(const std::filesystem::path& target, const char* mark, std::filesystem::path& made,
                const std::function<int(const std::filesystem::path&)>& make) {
  static std::atomic<unsigned> counter{0};
  int error = EEXIST;
  while (error == EEXIST) {
    made = target;
    made += mark + std::to_string(::getpid()) + "-" + std::to_string(counter.fetch_add(1));
    error = make(made);
  }
  return error;
}

bool is_temporary_name(std::string_view name) {
  constexpr std::string_view kMark = ".tmp-";
  const size_t mark = name.rfind(kMark);
  if (mark == std::string_view::npos) {
    return false;
  }
  const auto end = name.substr(mark + kMark.size());
  const size_t dash = end.find('-');
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return dash != std::string_view::npos && is_number(end.substr(0, dash)) &&
         is_number(end.substr(dash + 1));
}

} // namespace hasten
