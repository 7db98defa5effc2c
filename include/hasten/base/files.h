// Reads, replaces and syncs whole files. hasten/io/commit.h replaces whole folders.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace hasten {

/// Returns the bytes of the whole file. Throws InputError that names the path and the reason.
std::string read_file(const std::filesystem::path& path);

/// Replaces the content of `path` by `bytes`: writes a temporary file in the same folder, calls
/// fsync, renames it and calls fsync on the folder. A crash leaves the old or the new file, never
/// a mixture. Keeps the old file's permissions. If `path` is a symbolic link, replaces its target.
/// Throws InputError if the folder does not exist or denies writing, or if `path` is a device or a
/// pipe, and Error for other failures such as a full disk. Both name the path and the reason and
/// leave the old file.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// Calls fsync on a file or a folder. Throws Error.
void sync_path(const std::filesystem::path& path);

/// Returns the 64-bit xxh3 hash as 16 hex digits.
std::string hash_hex(std::string_view bytes);

/// Creates something new with the name "<target><mark><pid>-<n>". Calls `make` with one name
/// after the other while it returns EEXIST: a name may be left by an earlier process with this
/// pid, or used by one in another container. `made` is the last name.
/// Returns the result of `make`: 0, or errno.
int make_beside(const std::filesystem::path& target, const char* mark, std::filesystem::path& made,
                const std::function<int(const std::filesystem::path&)>& make);

/// Whether a name ends like those of make_beside() with the mark ".tmp-", which files and folders
/// have before they replace their target.
bool is_temporary_name(std::string_view name);

namespace detail {

/// Writes all bytes, in one write(2) if the kernel accepts them. Waits where another process has made
/// a terminal non-blocking. Returns 0 or errno.
int write_all(int fd, std::string_view bytes) noexcept;

/// Throws for a system call that failed with errno `error`: "path: No space left on device".
/// It is an InputError if the path does not exist or access is denied, else an Error (for
/// example a full or failing disk).
[[noreturn]] void throw_file_error(const char* where, const std::filesystem::path& path, int error);

/// The folder of a file; "." for a bare name.
std::filesystem::path folder_of(const std::filesystem::path& path);

/// Appends what is left to read to `bytes`. `hint`: the expected size. Returns 0 or errno.
int read_all(int fd, std::string& bytes, size_t hint = 0);

/// Reads `count` bytes at an offset, fewer only at the end of the file. Returns how many, or -1
/// with errno set.
ssize_t read_at(int fd, void* to, size_t count, size_t offset) noexcept;

/// Owns a descriptor; -1: none.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { close(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  /// 0, or errno. Network file systems report a full disk only here.
  int close();

 private:
  int fd_ = -1;
};

/// Writes a file in several parts and replaces the old file in one step: writes to "<path>.tmp-…".
/// finish() syncs the file and renames it. Without finish() nothing is left. Functions throw as
/// throw_file_error() does. The constructor refuses devices and pipes, too (InputError).
class FileWriter {
 public:
  FileWriter(const char* where, std::filesystem::path path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// Gives the new file the permissions of the old one, if there is one.
  void keep_permissions() const;
  void write(std::string_view bytes) const;
  void finish();

 private:
  const char* where_;
  std::filesystem::path path_;
  std::filesystem::path temporary_{};
  FileDescriptor file_{};
  bool finished_ = false;
};

} // namespace detail

} // namespace hasten
