#include "support/device_communicator.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "group_core.h"
#include "hasten/comm/forwarding_communicator.h"
#include "support/device_memory.h"

namespace hasten::testing_support {

static bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == machine::kType;
}

static c10::Stream current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// `later` waits for what `earlier` has to do so far.
static void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

/// What a rank does with the tensors of a collective.
struct Roles {
  bool reads_output = false;
  bool writes_output = false;
  bool reads_input = false;
};

static Roles roles_of(const Collective& what, int rank) {
  using Kind = Collective::Kind;
  const bool root = rank == what.root;
  switch (what.kind) {
    case Kind::all_reduce:
      return {true, true, false};
    case Kind::reduce:
      return {true, root, false};
    case Kind::broadcast:
      return {root, !root, false};
    case Kind::gather:
      return {false, root, true};
    case Kind::scatter:
      return {false, true, root};
    default:
      return {false, true, true};
  }
}

/// A collective on copies in host memory. wait() copies the result back.
class DeviceWork final : public Work::State {
 public:
  DeviceWork(const Collective& what, int rank, const c10::Stream& stream)
      : what_(what),
        label_(what.kind_name()),
        roles_(roles_of(what, rank)),
        stream_(stream),
        caller_(current_stream(stream.device())) {
    label_.append(" \"").append(what.name).append("\"");
    order(caller_, stream);
    // Other ranks than the root may change their tensor of a reduce after start() has returned.
    const bool at_once = what.kind == Collective::Kind::reduce && !roles_.writes_output;
    const c10::StreamGuard guard(at_once ? caller_ : stream);
    machine::Kernel kernel(label_, stream.device_index());
    host_.output = copy(kernel, what.output, roles_.reads_output);
    host_.input = copy(kernel, what.input, roles_.reads_input);
    if (roles_.writes_output) {
      kernel.touch(what.output, true); // from now on, for everyone who does not wait
    }
  }

  ~DeviceWork() override {
    if (work_ && roles_.writes_output && !copied_) { // it ends when nobody waits any more
      const c10::StreamGuard guard(stream_);
      machine::Kernel kernel(label_, stream_.device_index());
      kernel.touch(what_.output, true);
      std::memset(machine::host_view(what_.output.detach()).data_ptr(), 0xff,
                  what_.output.nbytes());
    }
    order(stream_, caller_);
  }

  void start(Communicator& inner) {
    Collective host = what_;
    host.output = host_.output;
    host.input = host_.input;
    work_ = inner.start(host);
    what_.name = {}; // the caller's text
  }

  void wait() override {
    try {
      work_.wait();
    } catch (...) { // it has ended
      order(stream_, current_stream(stream_.device()));
      throw;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (roles_.writes_output && !std::exchange(copied_, true)) {
      const c10::StreamGuard guard(stream_);
      machine::Kernel kernel(label_, stream_.device_index());
      kernel.touch(what_.output, true);
      machine::host_view(what_.output.detach()).copy_(host_.output);
    }
    order(stream_, current_stream(stream_.device()));
  }
  bool done() const noexcept override { return work_.done(); }
  std::chrono::steady_clock::time_point ended() const noexcept override { return work_.ended(); }

 private:
  static at::Tensor copy(machine::Kernel& kernel, const at::Tensor& tensor, bool reads) {
    if (!on_device(tensor)) {
      return tensor;
    }
    at::Tensor made =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    if (reads) {
      kernel.touch(tensor, false);
      made.copy_(machine::host_view(tensor.detach()));
    }
    return made;
  }

  struct HostTensors {
    at::Tensor output;
    at::Tensor input;
  };

  // Set at construction and by start(). what_ keeps the tensors until the handle is gone.
  Collective what_;
  std::string label_;
  const Roles roles_;
  const c10::Stream stream_;
  const c10::Stream caller_; // the stream that was current at the start
  HostTensors host_;
  Work work_;

  std::mutex mutex_;
  bool copied_ = false;
};

class DeviceCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  Work start(const Collective& what) override {
    const at::Tensor& tensor = what.shared();
    if (!on_device(tensor)) {
      return inner_->start(what);
    }
    if (what.kind == Collective::Kind::reduce_scatter) {
      return reduce_scatter_by_all_to_all(what);
    }
    auto work = std::make_shared<DeviceWork>(what, rank(), stream_of(tensor.device()));
    work->start(*inner_);
    return Work(std::move(work));
  }
  Work start_together(const std::vector<Collective>& what) override {
    return Communicator::start_together(what);
  }
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override {
    return inner_->all_gather_rows(rows.cpu(), name).to(rows.device());
  }
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    return device_communicator(inner_->duplicate(options));
  }
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override {
    return device_communicator(inner_->new_group(ranks, options));
  }

 private:
  void entered(std::string_view, std::string_view, const at::Tensor&) override {}

  const c10::Stream& stream_of(const at::Device& device) {
    auto& stream = streams_.at(static_cast<size_t>(device.index()));
    if (!stream) {
      stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    }
    return *stream;
  }

  std::array<std::optional<c10::Stream>, kTestDevices> streams_{};
};

std::shared_ptr<Communicator> device_communicator(std::shared_ptr<Communicator> inner) {
  return std::make_shared<DeviceCommunicator>(std::move(inner));
}

} // namespace hasten::testing_support
