// Note [Order on a device]
// Each group has connections of its own, and a device runs the operations of all of them. If two
// ranks start the operations of two groups in different orders, each device may wait for the other.
// So all groups of the same ranks start operations in one order: the main thread does, and during a
// backward pass the one thread that autograd has for the device, while the main thread waits. With
// ShapeCheck::always the ranks compare how many operations of other groups came before.
#include "device_group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "backend_call.h"
#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/core/memory.h"
#include "hasten/core/side_stream.h"
#include "tensor_checks.h"

namespace hasten::detail {

/// The handle of operations that have started as one.
class DeviceWork final : public Work::State {
 public:
  DeviceWork(std::shared_ptr<GroupCore> core, std::shared_ptr<Flight> flight,
             std::vector<BackendCall> calls, const at::Device& device)
      : core_(std::move(core)),
        flight_(std::move(flight)),
        calls_(std::move(calls)),
        caller_(current_stream(device)) {}

  ~DeviceWork() override {
    try {
      if (const auto work = flight_->work()) {
        const c10::StreamGuard guard(caller_);
        work->synchronize();
        flight_->landed(caller_);
      }
    } catch (...) { // the device has failed
    }
  }

  void wait() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    check();
    const c10::Stream stream = current_stream(caller_.device());
    const auto work = flight_->work();
    if (!work) {
      flight_->block(stream);
      return;
    }
    try {
      work->wait();
    } catch (...) {
      core_->diagnose(flight_->operation, flight_->sequence, current_failure());
    }
    check(); // after an abort there is no result
    for (const BackendCall& call : calls_) {
      if (call.finish) {
        call.finish();
      }
    }
    flight_->landed(stream);
    if (stream != caller_) { // where the memory of copies goes back to
      flight_->block(caller_);
    }
    calls_.clear();
  }
  bool done() const noexcept override {
    return core_->link->liveness().failed() || !flight_->work() || flight_->done();
  }
  CommClock::time_point ended() const noexcept override { return flight_->ended(); }

 private:
  void check() {
    throw_if_interrupted();
    if (core_->link->liveness().failed()) {
      core_->check(flight_->operation);
    }
  }

  const std::shared_ptr<GroupCore> core_;
  const std::shared_ptr<Flight> flight_;
  std::mutex mutex_; // of those who wait
  std::vector<BackendCall> calls_; // keep the tensors
  const c10::Stream caller_; // the stream that was current at the start
};

DeviceGroup::DeviceGroup(std::shared_ptr<GlooGroup> host, DeviceBackendFactory factory,
                         at::Device device)
    : host_(std::move(host)), factory_(std::move(factory)), device_(device) {}

DeviceGroup::~DeviceGroup() {
  if (watch_) {
    watch_->stop();
  }
}

std::shared_ptr<Communicator> DeviceGroup::of_this_device(std::shared_ptr<Communicator> host) {
  auto gloo = std::dynamic_pointer_cast<GlooGroup>(host);
  return gloo ? std::make_shared<DeviceGroup>(std::move(gloo), factory_, device_)
              : std::move(host); // of one rank
}

ConnectionAdvice connection_advice(const std::string& text) {
  const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
  if (const size_t at = text.find("Duplicate GPU"); at != std::string::npos) {
    // "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    const size_t ranks = text.find("rank", at);
    return {"two ranks are on one GPU: " +
                (ranks == std::string::npos ? std::string()
                                            : text.substr(ranks, text.find('\n', ranks) - ranks)),
            "give each rank its own GPU, or use --backend gloo"};
  }
  if (has("no socket interface found") || has("NCCL_SOCKET_IFNAME")) {
    return {"NCCL found no network interface",
            "set NCCL_SOCKET_IFNAME to an interface that all hosts have, or unset it"};
  }
  return {};
}

void DeviceGroup::connect() {
  const std::shared_ptr<GroupCore> core = host_->core();
  const std::string operation = operation_label("create", core->options.name + " on the device");
  const uint64_t sequence = core->enter(operation);
  using Made = c10::intrusive_ptr<c10d::Backend>;
  const std::shared_ptr<StoreThread> thread = core->link->connect_store();
  std::future<Made> future =
      thread->post<Made>([factory = factory_, device = device_, options = core->options,
                          rank = rank(), size = world_size(), prefix = "device/" + core->key](
                             c10d::Store& store, const std::atomic<bool>&) {
        const c10::DeviceGuard guard(device);
        return factory(
            {c10::make_intrusive<c10d::PrefixStore>(prefix, StorePtr::reclaim_copy(&store)), rank,
             size, device, options});
      });
  if (!await_future(future, CommClock::now() + core->options.timeout,
                    [&] { core->poll(operation); })) {
    core->diagnose(operation, sequence, {.kind = ErrorKind::timed_out});
  }
  try {
    const auto made = std::make_shared<DeviceConnections>(future.get(), device_);
    core->keep_device(made);
    connections_ = made;
    operations_ = 0;
    watch_ = DeviceWatch::start(core, made);
  } catch (const InputError&) {
    throw;
  } catch (const std::exception& error) {
    const ConnectionAdvice advice = connection_advice(error.what());
    if (!advice.what.empty()) {
      core->fail(operation, advice.what, advice.fix);
    }
    core->diagnose(operation, sequence, {error.what(), error_kind(error)});
  }
}

std::optional<Survivors> DeviceGroup::shrink() {
  std::optional<Survivors> left = host_->shrink();
  while (left) {
    if (watch_) {
      watch_->stop();
    }
    try {
      connect();
      break;
    } catch (const CommunicationError&) {
      const std::optional<Survivors> fewer = host_->shrink();
      if (!fewer) {
        throw;
      }
      for (size_t i = 0; i < fewer->ranks.size(); ++i) {
        left->ranks[i] = left->ranks[static_cast<size_t>(fewer->ranks[i])];
      }
      left->ranks.resize(fewer->ranks.size());
      left->cause += "; " + fewer->cause;
    }
  }
  return left;
}

void DeviceGroup::close() noexcept {
  try {
    if (watch_) {
      watch_->wait_idle();
      watch_->stop();
    }
  } catch (...) { // out of memory, at the end of the run
  }
  host_->close();
}

at::Tensor DeviceGroup::all_gather_rows(const at::Tensor& rows, std::string_view name) {
  return gather_rows(*this, *host_->core(), rows, name);
}

/// Whether the back end of the device takes the operation. Devices of other types go through Gloo.
bool DeviceGroup::on_device(const Collective& what) const {
  const at::Device device = what.shared().device();
  if (device.type() != device_.type()) {
    return false;
  }
  if (device != device_) {
    throw InputError("comm::" + std::string(what.kind_name()),
                     "tensor on " + device.str() + " in a group of " + device_.str(),
                     "tensors of the group's device, or of the CPU");
  }
  return true;
}

/// Back ends add in the dtype of the input.
bool DeviceGroup::is_native(const Collective& what) const {
  return what.kind != Collective::Kind::reduce_scatter ||
         what.input.scalar_type() == what.output.scalar_type();
}

Work DeviceGroup::start_together(const std::vector<Collective>& what) {
  bool apart = what.empty();
  for (const Collective& one : what) {
    check_collective(one, rank(), world_size());
    const bool here = on_device(one);
    if (what.size() == 1 && !here) {
      return host_->start(one);
    }
    if (what.size() == 1 && !is_native(one)) {
      return reduce_scatter_by_all_to_all(one);
    }
    apart = apart || !here || !is_native(one);
  }
  return apart ? Communicator::start_together(what) : start_on_device(what);
}

Work DeviceGroup::start_on_device(const std::vector<Collective>& what) {
  const std::shared_ptr<GroupCore> core = host_->core();
  if (!watch_) {
    connect();
  }
  const std::shared_ptr<DeviceConnections> connections = connections_.lock();
  if (!connections) { // closed
    core->enter(operation_label(what[0].kind_name(), what[0].name));
  }
  c10d::Backend& backend = connections->backend();
  if (what.size() > 1 && !backend.supportsCoalescing()) {
    return Communicator::start_together(what);
  }
  std::vector<BackendCall> calls;
  std::string operation;
  uint64_t sequence = 0;
  for (const Collective& one : what) {
    const uint64_t others = core->link->count_operation(core->members) - ++operations_;
    std::string text = collective_text(one);
    if (core->options.check_shapes == ShapeCheck::always && others > 0) {
      // See Note [Order on a device].
      text += ", after " + std::to_string(others) + " operations of other groups on the device";
    }
    operation = operation_label(one.kind_name(), one.name);
    sequence = core->enter_equal(operation, text);
    calls.emplace_back(one, rank(), world_size(), core->options.sum_in_fp32);
  }
  c10::intrusive_ptr<c10d::Work> work;
  try {
    if (calls.size() > 1) {
      backend.startCoalescing();
    }
    for (BackendCall& call : calls) {
      work = call.start(backend);
    }
    if (calls.size() > 1) {
      work = backend.endCoalescing();
    }
  } catch (...) { // the group is dead from now on
    core->diagnose(operation, sequence, current_failure());
  }
  auto flight = std::make_shared<Flight>(operation, sequence, std::move(work));
  watch_->add(flight);
  return Work(std::make_shared<DeviceWork>(core, std::move(flight), std::move(calls), device_));
}

std::shared_ptr<Communicator> make_device_group(const BackendContext& context,
                                                DeviceBackendFactory factory) {
  at::Device device = context.options.device;
  if (!device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  auto group = std::make_shared<DeviceGroup>(
      std::make_shared<GlooGroup>(context.link, context.options), std::move(factory), device);
  group->connect();
  return group;
}

} // namespace hasten::detail
