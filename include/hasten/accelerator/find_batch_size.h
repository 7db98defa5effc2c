// The largest batch that fits into memory, by trying: Accelerate's
// find_executable_batch_size.
//
//   const int64_t size = hasten::find_executable_batch_size(
//       [&](int64_t batch_size) {
//         ...  // one forward and backward on the largest rows
//       },
//       {.starting_batch_size = 64, .memory_limit_bytes = 4'000'000'000},
//       &accelerator);
//
// On a GPU memory runs out by itself. On a CPU Linux promises more than it has and
// ends the process later: give a limit, which the memory meter (core/memory.h)
// holds tensors to.
#pragma once

#include <cstdint>
#include <functional>

namespace hasten {

class Collect;

struct FindBatchSizeOptions {
  /// First size tried, >= 1.
  int64_t starting_batch_size = 128;
  /// Above 0: only divisors of it are tried, so that an accumulation over
  /// effective_batch_size / size batches gives the same updates. Rows a rank.
  int64_t effective_batch_size = 0;
  /// Most bytes that all CPU tensors of this process, those that exist already
  /// included, may take during an attempt; 0: as many as there are.
  int64_t memory_limit_bytes = 0;
};

/// attempt(size), with half the size (rounded down, and down to a divisor) after
/// each that ran out of memory (core/memory.h: is_out_of_memory) on any rank. Returns
/// the first size that no rank ran out at. What an attempt allocated and let go is
/// free before the next begins; putting gradients and generators back is up to it.
///
/// `ranks`: an Accelerator, or null for a process alone. With several ranks an
/// attempt communicates nothing, or a rank that ran out would leave the others
/// waiting: a forward and a backward of torch's, or one under no_sync(); ranks meet
/// behind each attempt (one small message through the store). Collective then.
/// Throws InputError on every rank where size 1 (the least divisor) does not fit;
/// what else an attempt throws, of which the peers are told.
int64_t find_executable_batch_size(const std::function<void(int64_t batch_size)>& attempt,
                                   const FindBatchSizeOptions& options = {},
                                   Collect* ranks = nullptr);

} // namespace hasten
