// Finds the largest batch size that fits into memory by trying, like Accelerate's
// find_executable_batch_size.
//
//   const int64_t size = hasten::find_executable_batch_size(
//       [&](int64_t batch_size) {
//         ...  // one forward and backward on the longest samples
//       },
//       {.starting_batch_size = 64, .memory_limit_bytes = 4'000'000'000},
//       &accelerator);
//
// A GPU reports when it is out of memory. On a CPU, Linux allocates more than there is and kills
// the process later. Therefore set a limit there; core/memory.h enforces it for tensors.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>

namespace hasten {

class Collect;

struct FindBatchSizeOptions {
  /// The first size to try. ≥ 1.
  int64_t starting_batch_size = 128;
  /// If > 0, only divisors of it are tried, so that accumulation over effective_batch_size / size
  /// batches gives the same optimizer steps. Samples per rank.
  int64_t effective_batch_size = 0;
  /// Limit for all tensors of this process on `device` during an attempt, existing tensors included.
  /// Bytes; 0: no limit. On the CPU the allocation that exceeds it fails. On another device the
  /// attempt runs to its end, and then its peak is compared.
  int64_t memory_limit_bytes = 0;
  c10::Device device = c10::kCPU;
};

/// Calls attempt(size). After each attempt that ran out of memory on any rank (core/memory.h:
/// is_out_of_memory) it halves the size (rounded down, and down to a divisor). Returns the first
/// size that fits on all ranks. Memory that an attempt allocated and released is free before the
/// next one begins. The attempt itself must restore gradients and generators.
///
/// `ranks`: an Accelerator, or null for a single process. With several ranks an attempt must not
/// communicate, because a rank that runs out of memory would leave the others waiting: use torch's
/// own forward and backward, or backward under no_sync(). The ranks communicate after each attempt
/// (one small message through the store). The function is then collective.
/// Throws InputError on every rank if size 1 (the smallest divisor) does not fit. Rethrows other
/// exceptions of an attempt, and the peers learn of them.
int64_t find_executable_batch_size(const std::function<void(int64_t batch_size)>& attempt,
                                   const FindBatchSizeOptions& options = {},
                                   Collect* ranks = nullptr);

} // namespace hasten
