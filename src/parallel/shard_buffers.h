// Recycled memory for unsharded units. It is taken and returned many times per step, and the first
// access to fresh memory costs six times a pass over warm memory. On other devices than the CPU their
// allocator does this. It knows the stream that uses the memory, and gives the memory to later work
// of that stream only. Work::wait() orders that stream after a collective. So memory may be returned
// as soon as each collective on it was waited for, or the last handle of it is gone.
// Threading: a buffer may be returned on any thread (for example Gloo's, at the end of its work).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "hasten/flat/flat_gradients.h"

namespace hasten::detail {

class ShardBuffers : public std::enable_shared_from_this<ShardBuffers> {
 public:
  /// `allocate`: makes new buffers of the CPU.
  explicit ShardBuffers(FlatAllocator allocate) : allocate_(std::move(allocate)) {}

  /// A tensor with undefined contents. Its memory returns here when the last tensor that uses it is
  /// destroyed. Uses the best fit of the idle buffers. If none fits, a new buffer replaces the
  /// largest of those that are too small.
  at::Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options);
  /// The same, as the memory of a storage.
  c10::DataPtr take_memory(size_t bytes, at::Device device);

  /// New zeros that do not return here.
  at::Tensor zeros(int64_t numel, const at::TensorOptions& options) const {
    return allocate_(numel, options);
  }

  /// Bytes of all buffers, in use or idle.
  int64_t bytes() const;
  /// Frees the idle buffers.
  void release();

 private:
  at::Tensor find(int64_t bytes, at::Device device);
  void give_back(at::Tensor buffer);

  const FlatAllocator allocate_;
  mutable std::mutex mutex_;
  std::unordered_map<at::Device, std::multimap<int64_t, at::Tensor>> idle_{}; // by bytes
  int64_t bytes_ = 0;
};

} // namespace hasten::detail
