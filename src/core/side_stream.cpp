#include "hasten/core/side_stream.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "hasten/core/device.h"

namespace hasten::detail {

c10::Stream current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

SideStream::SideStream(const at::Device& device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

void SideStream::copy(const at::Tensor& to, const at::Tensor& from) const {
  const c10::StreamGuard here(stream_);
  to.copy_(from, /*non_blocking=*/true);
}

at::Tensor SideStream::upload(const at::Tensor& tensor) const {
  if (!tensor.is_cpu()) { // the caller's stream may have made it
    return tensor_to_device(tensor, stream_.device());
  }
  const c10::StreamGuard here(stream_);
  return tensor_to_device(tensor, stream_.device());
}

void SideStream::follow() const {
  c10::Event event(stream_.device_type());
  event.record(current_stream(stream_.device()));
  event.block(stream_);
}

c10::Event SideStream::mark() const {
  c10::Event event(stream_.device_type());
  event.record(stream_);
  return event;
}

void SideStream::join() const { mark().block(current_stream(stream_.device())); }

} // namespace hasten::detail
