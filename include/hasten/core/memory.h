// Counts what LibTorch allocates on the CPU, exactly and in every thread, and can limit it. Also
// reads the counters of other devices, and the process's resident memory from the kernel.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "hasten/base/error.h"

namespace hasten {

struct MemoryStats {
  /// Bytes of tensors alive now, those of Communicator::allocate_tensor() included. For the CPU 0 if no
  /// meter is installed.
  int64_t live_bytes = 0;
  /// Maximum of live_bytes since the last reset.
  int64_t peak_bytes = 0;
  /// Number of allocations since the meter was installed, or since the process began.
  int64_t allocations = 0;
  /// How often the device's memory ran out. Not counted for the CPU.
  int64_t shortages = 0;
};

/// Replaces torch's CPU allocator by one that counts, for the rest of the process. Tensors made
/// before keep their own deleter and stay valid. A second call does nothing. Costs a header of 64
/// bytes per storage and two atomic additions. Call it at the start, before other threads
/// allocate.
void install_memory_meter();
/// What the meter counts, or, for another device than the CPU, what the device's allocator counts.
MemoryStats memory_stats(const c10::Device& device = c10::kCPU);
void reset_peak_memory(const c10::Device& device = c10::kCPU);

/// While an object lives, an allocation for a CPU tensor that would bring live_bytes above
/// `bytes` throws c10::OutOfMemoryError, in every thread. Without it Linux, which promises more
/// memory than it has, would kill the process. Installs the meter. Does not count scratch memory
/// of libraries (oneDNN, BLAS). If several limits live, the smallest one counts. Any thread may
/// create and destroy them.
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

/// Bytes that tensors can still take; 0 if that is unknown. For a device this is its free memory and
/// the memory that its allocator keeps for reuse. For the CPU it is available_memory_bytes().
int64_t memory_left(const c10::Device& device = c10::kCPU);
/// Bytes of tensors that this process may have: those alive now, and 90 % of what is left, divided
/// by the processes of this host that share the device. `name`: the option that chose the device
/// (AcceleratorOptions::device). 0 if what is left is unknown.
int64_t memory_share(const c10::Device& device, const std::string& name);
/// Gives the memory that a device's allocator keeps for reuse back to the device.
void empty_cache(const c10::Device& device);

/// Whether the exception reports that memory ran out: c10::OutOfMemoryError (from a MemoryLimit
/// or a GPU), std::bad_alloc, the error of torch's CPU allocator, or an Error of that kind.
bool is_out_of_memory(const std::exception& error);
/// out_of_memory if is_out_of_memory(), else kind_of() (base/error.h).
ErrorKind error_kind(const std::exception& error);

/// Maximum resident memory of this process so far, in bytes (VmHWM), without the peers' memory that
/// it maps now (back end shm): the rank that owns it counts it.
int64_t peak_resident_bytes();
/// Resident memory now, in bytes, likewise.
int64_t resident_bytes();

namespace detail {

/// Counts memory of a tensor that is not from the CPU allocator. False if no meter is installed; then do
/// not uncount it. Throws c10::OutOfMemoryError like an allocation above a MemoryLimit.
bool count_memory(int64_t bytes);
void uncount_memory(int64_t bytes);
/// Call it when this process maps `bytes` more of the memory of its peers, or less if negative.
void map_memory_of_peers(int64_t bytes);

/// What this process's tensors are expected to take at most. Errors name it. Bytes; 0: nothing is
/// planned.
void plan_memory(int64_t bytes);
/// If LibTorch reports that memory of `device` ran out, throws an Error of kind out_of_memory. The
/// Error has LibTorch's text, what was running ("backward"), and the bytes in use, left and planned.
/// Returns for other exceptions, and on the CPU, whose exceptions stay LibTorch's.
void name_shortage(const std::exception& error, std::string_view where, std::string_view running,
                   const c10::Device& device);

} // namespace detail

} // namespace hasten
