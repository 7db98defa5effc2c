// Counts what LibTorch allocates on the CPU, exactly and in every thread, and
// asks the kernel for the process's resident memory.
#pragma once

#include <cstdint>

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

/// Most resident memory of this process so far, in bytes (VmHWM).
int64_t peak_resident_bytes();
/// Resident memory now, in bytes.
int64_t resident_bytes();

} // namespace hasten
