#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/trainer/output_folder.h"

namespace hasten {

namespace detail {

/// The process that holds a lock on this file according to /proc/locks; 0 if the file is not listed
/// there.
int lock_holder(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    return 0;
  }
  char wanted[64];
  std::snprintf(wanted, sizeof wanted, "%02x:%02x:%llu", major(info.st_dev), minor(info.st_dev),
                static_cast<unsigned long long>(info.st_ino));
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    // 1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
    std::istringstream words(line);
    std::string number, kind, mode, type, pid, file;
    words >> number >> kind >> mode >> type >> pid >> file;
    if (kind == "FLOCK" && file == wanted) {
      return std::max(0, parse_number<int>(pid).value_or(0));
    }
  }
  return 0;
}

/// Returns an open descriptor that holds the lock, or one without a lock if the file system has no
/// locks, or none if the folder cannot be opened. `kind`: LOCK_EX, or LOCK_SH to check whether another
/// process holds that one. Waits up to 0.6 s, and 30 s for a process that is ending: a killed run
/// takes a while to free its memory.
FileDescriptor lock_folder(const std::filesystem::path& folder, int kind) {
  FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  int holder = 0;
  for (int attempt = 0; fd && (attempt < 60 || (attempt < 3000 && holder > 0 && is_ending(holder)));
       ++attempt) {
    if (::flock(fd.get(), kind | LOCK_NB) == 0 || errno != EWOULDBLOCK) {
      return fd;
    }
    holder = lock_holder(fd.get());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (fd) {
    throw InputError("trainer::output_folder",
                     "output_dir=" + folder.string() + " is in use by another run" +
                         (holder > 0 ? " (process " + std::to_string(holder) + ")" : ""),
                     "a folder that no other run uses",
                     "choose another folder, or wait for that run to end");
  }
  return fd;
}

} // namespace detail

OutputDirLock::OutputDirLock(const std::filesystem::path& folder) : folder_(folder) {
  if (folder.empty()) {
    return;
  }
  std::error_code error;
  made_ = std::filesystem::create_directories(folder, error);
  fd_ = detail::lock_folder(folder, LOCK_EX);
}

OutputDirLock::~OutputDirLock() {
  if (made_) {
    ::rmdir(folder_.c_str()); // removes only an empty folder
  }
}

void OutputDirLock::require_in_place() const {
  struct stat held {
  }, there{};
  if (!fd_ || ::fstat(fd_.get(), &held) != 0) {
    return;
  }
  const bool found = ::stat(folder_.c_str(), &there) == 0;
  if (found && there.st_dev == held.st_dev && there.st_ino == held.st_ino) {
    return;
  }
  std::error_code error;
  const std::string now =
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd_.get()), error).string();
  const bool removed = held.st_nlink == 0 || now.empty();
  throw Error("trainer::output_folder",
              "output_dir=" + folder_.string() + " was " +
                  (removed ? "removed" : "moved to " + now) + " during this run" +
                  (found ? ", and another folder is in its place" : ""),
              "the same folder during the whole run",
              removed ? "start the run again"
                      : "move it back, and resume with resume_from_checkpoint=auto");
}

void require_unlocked_output_dir(const std::filesystem::path& folder) {
  if (!folder.empty()) {
    detail::lock_folder(folder, LOCK_SH);
  }
}

} // namespace hasten
