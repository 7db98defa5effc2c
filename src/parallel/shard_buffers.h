// Memory that comes and goes with units: taken and given back many times a step, and
// first touch of fresh memory costs six times a warm pass.
// Threading: a buffer may be given back on any thread (Gloo's, at its work's end).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace hasten::detail {

class ShardBuffers : public std::enable_shared_from_this<ShardBuffers> {
 public:
  /// Undetermined contents. The memory comes back here when the last tensor on it is
  /// gone. Best fit among idle ones; where none fits, a new one in place of the
  /// largest that is too small.
  at::Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options);
  /// The same as the memory of a storage.
  c10::DataPtr take_memory(size_t bytes, at::Device device);

  /// Of all buffers, lent or idle.
  int64_t bytes() const;
  /// Frees the idle ones.
  void release();

 private:
  at::Tensor find(int64_t bytes, at::Device device);
  void give_back(at::Tensor buffer);

  mutable std::mutex mutex_;
  std::vector<at::Tensor> idle_{}; // bytes
  int64_t bytes_ = 0;
};

} // namespace hasten::detail
