// A second stream of a device, for copies that overlap with the work of the caller's stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace hasten::detail {

/// A stream of the device's pool. Its work has no order with the work of the calling thread's
/// current stream, but where mark() and follow() give it one.
class SideStream {
 public:
  explicit SideStream(const at::Device& device);

  /// Copies `from` to `to` on this stream. One of them is in pinned memory.
  void copy(const at::Tensor& to, const at::Tensor& from) const;
  /// A copy of a tensor of the CPU on the device, in memory of this stream. Blocks the host only if
  /// the tensor is not in pinned memory.
  at::Tensor upload(const at::Tensor& tensor) const;
  /// Later work of this stream waits for the work of the calling thread's stream so far.
  void follow() const;
  /// An event after the work of this stream so far.
  c10::Event mark() const;
  /// The calling thread's stream waits for the work of this stream so far.
  void join() const;

  const c10::Stream& stream() const { return stream_; }

 private:
  c10::Stream stream_;
};

/// The calling thread's current stream of the device.
c10::Stream current_stream(const at::Device& device);

} // namespace hasten::detail
