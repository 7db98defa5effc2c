// Memory of this process that other processes of the host can read, but neither write nor resize.
// It has no name: it ends with the processes that map it, however they end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "hasten/base/files.h"

namespace hasten::detail {

/// Where a process finds a peer's memory while the peer offers it.
struct SharedMemoryAddress {
  int pid = 0;
  int descriptor = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SharedMemoryAddress, pid, descriptor, device, inode, bytes)

class SharedMemory {
 public:
  /// Allocates zeros, so that later accesses cannot fail. Counts in the memory meter. Throws Error if
  /// the host, its control group or /dev/shm has less memory, with the bytes that are missing, and
  /// c10::OutOfMemoryError if a MemoryLimit permits less.
  explicit SharedMemory(size_t bytes);
  /// Maps a peer's memory to read. Throws Error if it cannot: the peer has ended, or it belongs to
  /// another user or container.
  explicit SharedMemory(const SharedMemoryAddress& of);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// Of own memory, until hide().
  SharedMemoryAddress address() const;
  /// From now on no other process can map it. Those that have go on.
  void hide() { descriptor_.close(); }

 private:
  SharedMemory() = default;
  void map(int protection);

  char* data_ = nullptr;
  size_t bytes_ = 0;
  FileDescriptor descriptor_{};
  bool of_peer_ = false;
  bool counted_ = false; // in the memory meter
};

} // namespace hasten::detail
