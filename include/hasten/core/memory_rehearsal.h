// Measures the memory of a step without allocating it:
//
//   const hasten::MemoryRehearsal rehearsal;
//   Model model(options); // of any size
//   model->forward(torch::ones({8, 128}, torch::kLong)).sum().backward();
//   hasten::memory_stats().peak_bytes;
//
// Threading: affects the calling thread, in which backward on the CPU runs, too.
#pragma once

#include <memory>

namespace hasten {

namespace detail {

/// While the result lives, CPU tensors of this thread get no memory and are counted separately.
std::shared_ptr<void> without_memory();

} // namespace detail

/// While an object lives, operators on CPU tensors of this thread compute nothing: results have
/// shape and dtype but no memory. memory_stats() and reset_peak_memory() of this thread count what
/// the results would take, starting at 0. Autograd, autocast and hasten's layers work as usual.
/// Reading a value (item) returns 0. In-place operators change nothing. A kernel's temporary memory
/// is not counted. An operator without a meta kernel and without a rule in memory_rehearsal.cpp
/// throws c10::Error. The data pointer of a tensor of more than 16 bytes is null. Installs the
/// memory meter.
class [[nodiscard]] MemoryRehearsal {
 public:
  MemoryRehearsal();
  MemoryRehearsal(const MemoryRehearsal&) = delete;
  MemoryRehearsal& operator=(const MemoryRehearsal&) = delete;

 private:
  std::shared_ptr<void> without_memory_;
  std::shared_ptr<void> observer_;
};

/// Whether this thread rehearses. A kernel that uses pointers must then not read or write them.
bool in_memory_rehearsal();

} // namespace hasten
