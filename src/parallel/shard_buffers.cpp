#include "shard_buffers.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <utility>

namespace hasten::detail {

at::Tensor ShardBuffers::find(int64_t bytes, at::Device device) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& idle = idle_[device];
    const auto fits = idle.lower_bound(bytes);
    if (fits != idle.end() && fits->first <= 2 * bytes + 4096) {
      return idle.extract(fits).mapped();
    }
    at::Tensor small; // the largest that is too small is freed here
    if (fits != idle.begin()) {
      small = idle.extract(std::prev(fits)).mapped();
    }
    bytes_ += bytes - (small.defined() ? small.numel() : 0);
  }
  return allocate_(bytes, at::TensorOptions(at::kByte).device(device));
}

c10::DataPtr ShardBuffers::take_memory(size_t bytes, at::Device device) {
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    return c10::getDeviceAllocator(device.type())->allocate(bytes);
  }
  struct BufferInUse {
    std::shared_ptr<ShardBuffers> owner;
    at::Tensor buffer;
  };
  auto in_use = std::make_unique<BufferInUse>(
      BufferInUse{shared_from_this(), find(static_cast<int64_t>(bytes), device)});
  void* data = in_use->buffer.mutable_data_ptr();
  return c10::DataPtr(
      data, in_use.release(),
      [](void* context) {
        const std::unique_ptr<BufferInUse> back(static_cast<BufferInUse*>(context));
        back->owner->give_back(std::move(back->buffer));
      },
      device);
}

at::Tensor ShardBuffers::take(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    return at::empty(sizes, options);
  }
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
                       c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  auto memory = std::make_shared<c10::DataPtr>(take_memory(bytes, options.device()));
  void* data = memory->get();
  return at::from_blob(data, sizes, [memory](void*) mutable { memory.reset(); }, options);
}

void ShardBuffers::give_back(at::Tensor buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_[buffer.device()].emplace(buffer.numel(), std::move(buffer));
}

int64_t ShardBuffers::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

void ShardBuffers::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, idle] : std::exchange(idle_, {})) {
    for (const auto& [bytes, buffer] : idle) {
      bytes_ -= bytes;
    }
  }
}

} // namespace hasten::detail
