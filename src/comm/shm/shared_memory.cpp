#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/host_memory.h"
#include "hasten/base/store_channel.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace hasten::detail {

constexpr const char* kWhere = "comm::shared_memory";

[[noreturn]] static void throw_system_error(const std::string& what, int error) {
  throw Error(kWhere, what + ": " + std::generic_category().message(error));
}

/// A file in memory that nothing but the descriptor names.
static FileDescriptor nameless_file() {
  FileDescriptor file(::memfd_create("hasten", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) { // a sandbox without it
    const std::string name = "/" + unique_socket_name("hasten-");
    file = FileDescriptor(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
    if (!file) {
      throw_system_error("cannot make a file in memory", errno);
    }
    ::shm_unlink(name.c_str());
  }
  return file;
}

// The destructor runs after an exception, because the object is complete when the body begins.
SharedMemory::SharedMemory(size_t bytes) : SharedMemory() {
  bytes_ = bytes;
  const int64_t left = available_memory_bytes();
  if (left > 0 && std::cmp_less(left, bytes)) { // the kernel would end the process instead
    throw Error(kWhere, "the memory is too small: " + format_bytes(static_cast<int64_t>(bytes)) +
                            " wanted, " + format_bytes(static_cast<int64_t>(bytes) - left) +
                            " of it missing");
  }
  counted_ = count_memory(static_cast<int64_t>(bytes));
  descriptor_ = nameless_file();
  const int error = ::posix_fallocate(descriptor_.get(), 0, static_cast<off_t>(bytes));
  if (error == ENOSPC) {
    throw Error(kWhere, "/dev/shm is too small for " + format_bytes(static_cast<int64_t>(bytes)));
  }
  if (error != 0) {
    throw_system_error("cannot allocate " + format_bytes(static_cast<int64_t>(bytes)), error);
  }
  map(PROT_READ | PROT_WRITE);
  // From here on nobody else can write or resize it. Kernels before 5.1 lack the first seal, and
  // files of shm_open have none: peers map those to read, as they do here.
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(descriptor_.get(), F_ADD_SEALS, kSize | F_SEAL_FUTURE_WRITE) != 0) {
    ::fcntl(descriptor_.get(), F_ADD_SEALS, kSize);
  }
}

SharedMemory::SharedMemory(const SharedMemoryAddress& of) : SharedMemory() {
  bytes_ = of.bytes;
  const std::string path =
      "/proc/" + std::to_string(of.pid) + "/fd/" + std::to_string(of.descriptor);
  descriptor_ = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!descriptor_) {
    throw_system_error("cannot open the memory of process " + std::to_string(of.pid), errno);
  }
  struct stat found {};
  const bool same = ::fstat(descriptor_.get(), &found) == 0 && found.st_dev == of.device &&
                    found.st_ino == of.inode && std::cmp_equal(found.st_size, of.bytes);
  if (!same) { // its number has gone to another process
    throw Error(kWhere, "process " + std::to_string(of.pid) + " offers other memory");
  }
  map(PROT_READ);
  of_peer_ = true;
  map_memory_of_peers(static_cast<int64_t>(bytes_));
  hide();
}

SharedMemory::~SharedMemory() {
  const auto bytes = static_cast<int64_t>(bytes_);
  if (counted_) {
    uncount_memory(bytes);
  }
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
    map_memory_of_peers(of_peer_ ? -bytes : 0);
  }
}

void SharedMemory::map(int protection) {
  void* const at =
      ::mmap(nullptr, bytes_, protection, MAP_SHARED | MAP_POPULATE, descriptor_.get(), 0);
  if (at == MAP_FAILED) {
    throw_system_error("cannot map " + format_bytes(static_cast<int64_t>(bytes_)), errno);
  }
  data_ = static_cast<char*>(at);
}

SharedMemoryAddress SharedMemory::address() const {
  struct stat own {};
  if (::fstat(descriptor_.get(), &own) != 0) {
    throw_system_error("cannot describe the memory", errno);
  }
  return {::getpid(), descriptor_.get(), own.st_dev, own.st_ino, bytes_};
}

} // namespace hasten::detail
