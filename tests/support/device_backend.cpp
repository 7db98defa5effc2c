#include "support/device_backend.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "hasten/comm/backend.h"
#include "meet/thread_scopes.h"
#include "support/device_memory.h"

namespace hasten::testing_support {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

static std::atomic<int> group_calls{0};

static c10::Stream current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// `later` waits for what `earlier` has to do so far.
static void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

/// What the operations of a back end share.
struct Ends {
  std::mutex mutex;
  std::condition_variable changed;
  bool aborted = false;
};

/// A tensor of an operation, and its copy in host memory.
struct HostCopy {
  at::Tensor device;
  at::Tensor host;
  bool writes = false;
};

/// A collective on copies in host memory. wait() copies the result back.
class TestWork final : public c10d::Work {
 public:
  TestWork(std::string label, const c10::Stream& stream, std::shared_ptr<Ends> ends)
      : label_(std::move(label)), stream_(stream), ends_(std::move(ends)) {
    order(current_stream(stream.device()), stream);
  }

  /// The copy of `tensor`, or `place` for it.
  at::Tensor host(const at::Tensor& tensor, bool reads, bool writes, at::Tensor place = {}) {
    TORCH_CHECK(tensor.device() == stream_.device(), "a tensor of another device");
    const c10::StreamGuard guard(stream_);
    machine::Kernel kernel(label_, stream_.device_index());
    HostCopy copy{tensor,
                  place.defined() ? std::move(place)
                                  : at::empty(tensor.sizes(), tensor.options().device(at::kCPU)),
                  writes};
    if (reads) {
      kernel.touch(tensor, false);
      copy.host.copy_(machine::host_view(tensor));
    }
    if (writes) {
      kernel.touch(tensor, true); // from now on, for everyone who does not wait
    }
    copies_.push_back(copy);
    return copy.host;
  }

  void begin(const WorkPtr& gloo) {
    gloo->getFuture()->addCallback(
        [self = c10::intrusive_ptr<TestWork>::reclaim_copy(this)](c10::ivalue::Future& future) {
          const std::lock_guard<std::mutex> lock(self->ends_->mutex);
          self->moved_ = !future.hasError(); // a lost peer leaves it as it is
          self->ends_->changed.notify_all();
        });
  }

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    std::unique_lock<std::mutex> lock(ends_->mutex);
    ends_->changed.wait(lock, [this] { return moved_ || ends_->aborted; });
    if (!std::exchange(written_, true)) {
      const bool moved = moved_;
      lock.unlock();
      write(moved);
    }
    order(stream_, current_stream(stream_.device()));
    return true;
  }
  /// The result of an operation that nobody waits for is nobody's.
  void synchronize() override {
    {
      const std::lock_guard<std::mutex> lock(ends_->mutex);
      if (std::exchange(written_, true)) {
        return;
      }
    }
    write(false);
    order(stream_, current_stream(stream_.device()));
  }
  bool isCompleted() override {
    const std::lock_guard<std::mutex> lock(ends_->mutex);
    return moved_ || ends_->aborted;
  }

 private:
  void write(bool moved) {
    const c10::StreamGuard guard(stream_);
    machine::Kernel kernel(label_, stream_.device_index());
    for (const HostCopy& copy : copies_) {
      if (copy.writes) {
        kernel.touch(copy.device, true);
        const at::Tensor to = machine::host_view(copy.device);
        moved ? static_cast<void>(to.copy_(copy.host))
              : static_cast<void>(std::memset(to.data_ptr(), 0xff, to.nbytes()));
      }
    }
    copies_.clear(); // Gloo's thread frees this object some time later
  }

  const std::string label_;
  const c10::Stream stream_;
  const std::shared_ptr<Ends> ends_; // guards the members below
  bool moved_ = false;
  bool written_ = false;
  std::vector<HostCopy> copies_; // keeps the tensors until write()
};

class JoinedTestWork final : public c10d::Work {
 public:
  explicit JoinedTestWork(std::vector<WorkPtr> all) : all_(std::move(all)) {}
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    for (const WorkPtr& one : all_) {
      one->wait();
    }
    return true;
  }
  void synchronize() override {
    for (const WorkPtr& one : all_) {
      one->synchronize();
    }
  }
  bool isCompleted() override {
    return std::ranges::all_of(all_, [](const WorkPtr& one) { return one->isCompleted(); });
  }

 private:
  const std::vector<WorkPtr> all_;
};

using Tensors = std::vector<at::Tensor>;

class TestBackend final : public c10d::Backend {
 public:
  explicit TestBackend(const DeviceBackendContext& context)
      : c10d::Backend(context.rank, context.world_size),
        stream_(c10::impl::VirtualGuardImpl(context.device.type())
                    .getStreamFromGlobalPool(context.device)) {
    const detail::NoBrokenPipeSignal no_signal; // in its threads, as in those of hasten's
    const detail::BatchThreads batch;
    const auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::hours(24));
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    gloo_ = c10::make_intrusive<c10d::ProcessGroupGloo>(context.store, context.rank,
                                                        context.world_size, options);
  }

  const std::string getBackendName() const override { return "test"; }
  void abort() override {
    const std::lock_guard<std::mutex> lock(ends_->mutex);
    ends_->aborted = true;
    ends_->changed.notify_all();
  }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    TORCH_CHECK(!std::exchange(coalescing_, true), "a group call in a group call");
    ++group_calls;
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(std::exchange(coalescing_, false), "no group call");
    return c10::make_intrusive<JoinedTestWork>(std::exchange(coalesced_, {}));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run("all_reduce", [&](TestWork& work) {
      Tensors host{work.host(tensors[0], true, true)};
      return gloo_->allreduce(host, options);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run("reduce", [&](TestWork& work) {
      Tensors host{work.host(tensors[0], true, rank_ == options.rootRank)};
      return gloo_->reduce(host, options);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", [&](TestWork& work) {
      const bool root = rank_ == options.rootRank;
      Tensors host{work.host(tensors[0], root, !root)};
      return gloo_->broadcast(host, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return run("all_gather", [&](TestWork& work) {
      at::Tensor from = work.host(input, true, false);
      at::Tensor to = work.host(output, false, true);
      return gloo_->_allgather_base(to, from, options);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return run("gather", [&](TestWork& work) {
      Tensors from{work.host(inputs[0], true, false)};
      std::vector<Tensors> to = host_rows(work, outputs, false);
      return gloo_->gather(to, from, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return run("scatter", [&](TestWork& work) {
      std::vector<Tensors> from = host_rows(work, inputs, true);
      Tensors to{work.host(outputs[0], false, true)};
      return gloo_->scatter(to, from, options);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_sizes,
                        std::vector<int64_t>& from_sizes,
                        const c10d::AllToAllOptions& options) override {
    return run("all_to_all", [&](TestWork& work) {
      at::Tensor from = work.host(input, true, false);
      at::Tensor to = work.host(output, false, true);
      return gloo_->alltoall_base(to, from, to_sizes, from_sizes, options);
    });
  }
  /// An all_reduce of which this rank keeps its row.
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter", [&](TestWork& work) {
      Tensors all{work.host(input, true, false)};
      work.host(output, false, true, all[0].view({size_, -1})[rank_].view(output.sizes()));
      return gloo_->allreduce(all, {.reduceOp = options.reduceOp});
    });
  }

 private:
  static std::vector<Tensors> host_rows(TestWork& work, const std::vector<Tensors>& lists,
                                        bool reads) {
    std::vector<Tensors> host;
    for (const Tensors& list : lists) {
      host.emplace_back();
      for (const at::Tensor& row : list) {
        host.back().push_back(work.host(row, reads, !reads));
      }
    }
    return host;
  }

  WorkPtr run(const char* label, const std::function<WorkPtr(TestWork&)>& start) {
    auto work = c10::make_intrusive<TestWork>(label, stream_, ends_);
    work->begin(start(*work));
    if (coalescing_) {
      coalesced_.push_back(work);
    }
    return work;
  }

  const c10::Stream stream_;
  const std::shared_ptr<Ends> ends_ = std::make_shared<Ends>();
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

void register_test_backend() {
  register_device_backend("test", machine::kType, [](const DeviceBackendContext& context) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<TestBackend>(context));
  });
}

std::shared_ptr<Communicator> device_world(const World& world, std::optional<int> device,
                                           CommunicatorOptions options) {
  register_test_backend();
  options.device = test_device(device.value_or(world.local_rank));
  return Communicator::create(world, options);
}

int device_group_calls() { return group_calls; }

} // namespace hasten::testing_support
