// Counts what LibTorch allocates on the CPU, exactly and in every thread, and
// asks the kernel for the process's resident memory. And limits it.
#pragma once

#include <cstdint>
#include <exception>

namespace hasten {

struct MemoryStats {
  /// Bytes of CPU tensors alive now; 0 while no meter is installed.
  int64_t live_bytes = 0;
  /// Most that was alive since the last reset.
  int64_t peak_bytes = 0;
  /// Allocations since the meter was installed.
  int64_t allocations = 0;
};

/// Puts a counting allocator in place of torch's CPU allocator, for the rest of
/// the process (tensors carry their own deleter, so those made before stay
/// right). A second call does nothing. Costs a 64-byte header a storage and two
/// atomic additions. Call it at start, before other threads allocate.
void install_memory_meter();
MemoryStats memory_stats();
void reset_peak_memory();

/// While it lives, memory for CPU tensors that would bring live_bytes above `bytes`
/// is refused by c10::OutOfMemoryError, in every thread: a limit that errors out
/// where Linux, which promises more than it has, would end the process. Installs the
/// meter. Scratch memory of libraries (oneDNN, BLAS) is not seen.
/// Nested: the least of those that live holds. Made and destroyed on any thread.
class MemoryLimit {
 public:
  /// Throws InputError unless bytes > 0.
  explicit MemoryLimit(int64_t bytes);
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;
  ~MemoryLimit();

 private:
  int64_t bytes_ = 0;
};

/// Whether an exception says that memory ran out: c10::OutOfMemoryError (a
/// MemoryLimit, a GPU), std::bad_alloc, or torch's CPU allocator.
bool is_out_of_memory(const std::exception& error);

/// Most resident memory of this process so far, in bytes (VmHWM).
int64_t peak_resident_bytes();
/// Resident memory now, in bytes.
int64_t resident_bytes();

} // namespace hasten
