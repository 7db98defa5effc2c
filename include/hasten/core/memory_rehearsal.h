// What a step takes, measured on tensors without memory:
//
//   const hasten::MemoryRehearsal rehearsal;
//   Model model(options); // of any size
//   model->forward(torch::ones({8, 128}, torch::kLong)).sum().backward();
//   hasten::memory_stats().peak_bytes;
//
// Threading: of the calling thread, which backward on the CPU runs in, too.
#pragma once

#include <memory>

namespace hasten {

namespace detail {

struct MemoryCounters;
class ShapeObserver;

/// CPU tensors of this thread get no memory and are counted apart.
class WithoutMemory {
 public:
  WithoutMemory();
  WithoutMemory(const WithoutMemory&) = delete;
  WithoutMemory& operator=(const WithoutMemory&) = delete;
  ~WithoutMemory();

 private:
  std::shared_ptr<MemoryCounters> counters_;
  std::shared_ptr<MemoryCounters>* before_;
};

} // namespace detail

/// While it lives, operators on CPU tensors compute nothing in this thread: results
/// have shapes, dtypes and no memory. memory_stats() and reset_peak_memory() of this
/// thread count what they would take, from 0 on. Autograd, autocast and hasten's own
/// layers do as ever. What reads a value (item) gets 0; operators in place leave values
/// as they are. Not counted: what a kernel takes and gives back. An operator that has
/// neither a meta kernel nor a rule in memory_rehearsal.cpp throws c10::Error. The
/// data of a tensor of more than 16 bytes is null. Installs the memory meter.
class [[nodiscard]] MemoryRehearsal {
 public:
  MemoryRehearsal();
  MemoryRehearsal(const MemoryRehearsal&) = delete;
  MemoryRehearsal& operator=(const MemoryRehearsal&) = delete;
  ~MemoryRehearsal();

 private:
  detail::WithoutMemory without_memory_{};
  std::unique_ptr<detail::ShapeObserver> observer_;
};

/// Whether this thread rehearses: kernels of pointers have nothing to read or write.
bool in_memory_rehearsal();

} // namespace hasten
