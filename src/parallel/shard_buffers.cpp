#include "shard_buffers.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace hasten::detail {

at::Tensor ShardBuffers::find(int64_t bytes, at::Device device) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = idle_.end();
    auto small = idle_.end(); // the largest that is too small
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const int64_t size = it->numel();
      if (it->device() != device) {
        continue;
      }
      if (size < bytes) {
        small = small == idle_.end() || size > small->numel() ? it : small;
      } else if (size <= 2 * bytes + 4096) {
        best = best == idle_.end() || size < best->numel() ? it : best;
      }
    }
    const bool fits = best != idle_.end();
    const auto found = fits ? best : small;
    at::Tensor buffer; // one that is too small is freed here
    if (found != idle_.end()) {
      buffer = std::move(*found);
      idle_.erase(found);
    }
    if (fits) {
      return buffer;
    }
    bytes_ += bytes - (buffer.defined() ? buffer.numel() : 0);
  }
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

c10::DataPtr ShardBuffers::take_memory(size_t bytes, at::Device device) {
  struct Lent {
    std::shared_ptr<ShardBuffers> owner;
    at::Tensor buffer;
  };
  auto lent =
      std::make_unique<Lent>(Lent{shared_from_this(), find(static_cast<int64_t>(bytes), device)});
  void* data = lent->buffer.mutable_data_ptr();
  return c10::DataPtr(
      data, lent.release(),
      [](void* context) {
        const std::unique_ptr<Lent> back(static_cast<Lent*>(context));
        back->owner->give_back(std::move(back->buffer));
      },
      device);
}

at::Tensor ShardBuffers::take(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
                       c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  auto memory = std::make_shared<c10::DataPtr>(take_memory(bytes, options.device()));
  void* data = memory->get();
  return at::from_blob(data, sizes, [memory](void*) mutable { memory.reset(); }, options);
}

void ShardBuffers::give_back(at::Tensor buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(std::move(buffer));
}

int64_t ShardBuffers::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

void ShardBuffers::release() {
  std::vector<at::Tensor> freed;
  const std::lock_guard<std::mutex> lock(mutex_);
  freed.swap(idle_);
  for (const at::Tensor& buffer : freed) {
    bytes_ -= buffer.numel();
  }
}

} // namespace hasten::detail
