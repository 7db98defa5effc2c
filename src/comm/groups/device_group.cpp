// A group of two halves: the operations of a device go through a back end of c10d that moves its
// memory (NCCL), everything else through Gloo. The halves share one GroupCore, and so the order of
// operations, the checks and the first error.
//
// Note [Order on a device]
// Each group has connections of its own, and a device runs the operations of all of them. If two
// ranks start the operations of two groups in different orders, each device may wait for the other.
// So all groups of the same ranks start operations in one order: the main thread does, and during a
// backward pass the one thread that autograd has for the device, while the main thread waits. With
// ShapeCheck::always the ranks compare how many operations of other groups came before.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "back_ends.h"
#include "device_watch.h"
#include "hasten/base/error.h"
#include "host_group.h"

namespace hasten::detail {

class DeviceGroup final : public HostGroup {
 public:
  DeviceGroup(std::shared_ptr<WorldLink> link, const CommunicatorOptions& options,
              std::vector<int> members, DeviceBackendFactory factory, const at::Device& device)
      : HostGroup(std::move(link), options, std::move(members)),
        factory_(std::move(factory)),
        device_(device) {}

  Work start(const Collective& what) override;
  Work start_together(const std::vector<Collective>& what) override;
  void close() noexcept override;

  /// Makes the device's connections, which the first operation there does otherwise. Collective.
  std::shared_ptr<DeviceConnections> connect_device();

 private:
  void connect() override;
  std::shared_ptr<Communicator> like_this(const CommunicatorOptions& options,
                                          std::vector<int> members) override;
  bool on_device(const Collective& what) const;
  Work start_on_device(const std::vector<Collective>& what);

  const DeviceBackendFactory factory_;
  const at::Device device_;
  std::weak_ptr<DeviceConnections> connections_; // GroupCore keeps them
  uint64_t operations_ = 0; // those that it has started on the device
};

std::shared_ptr<DeviceConnections> DeviceGroup::connect_device() {
  const auto made = std::make_shared<DeviceConnections>(
      core(),
      make_connections(core()->options.name + " on the device", "device/",
                       [factory = factory_, device = device_, options = core()->options,
                        rank = rank(), size = world_size()](StorePtr store) {
                         const c10::DeviceGuard guard(device);
                         return factory({std::move(store), rank, size, device, options});
                       }),
      device_);
  core()->keep(made);
  connections_ = made;
  operations_ = 0;
  watch_connections(made);
  return made;
}

void DeviceGroup::connect() {
  HostGroup::connect();
  connect_device();
}

std::shared_ptr<Communicator> DeviceGroup::like_this(const CommunicatorOptions& options,
                                                     std::vector<int> members) {
  return std::make_shared<DeviceGroup>(core()->link, options, std::move(members), factory_,
                                       device_);
}

void DeviceGroup::close() noexcept {
  if (const auto connections = connections_.lock()) {
    connections->wait_idle();
  }
  HostGroup::close();
}

/// Whether the operation is on the device. Tensors of other types of device go through Gloo.
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
static bool is_native(const Collective& what) {
  return what.kind != Collective::Kind::reduce_scatter ||
         what.input.scalar_type() == what.output.scalar_type();
}

Work DeviceGroup::start(const Collective& what) {
  check_collective(what, rank(), world_size());
  if (!on_device(what)) {
    return HostGroup::start(what);
  }
  return is_native(what) ? start_on_device({what}) : reduce_scatter_by_all_to_all(what);
}

Work DeviceGroup::start_together(const std::vector<Collective>& what) {
  bool together = what.size() > 1;
  for (const Collective& one : what) { // all are checked before the first one starts
    check_collective(one, rank(), world_size());
    together = on_device(one) && is_native(one) && together;
  }
  return together ? start_on_device(what) : HostGroup::start_together(what);
}

Work DeviceGroup::start_on_device(const std::vector<Collective>& what) {
  const std::shared_ptr<GroupCore>& core = HostGroup::core();
  const std::string operation = operation_label(what[0].kind_name(), what[0].name);
  core->check(operation);
  std::shared_ptr<DeviceConnections> connections = connections_.lock();
  connections = connections ? connections : connect_device();
  c10d::Backend& backend = connections->backend();
  if (what.size() > 1 && !backend.supportsCoalescing()) {
    return HostGroup::start_together(what);
  }
  std::vector<BackendCall> calls;
  std::string text;
  for (const Collective& one : what) {
    const std::string label = operation_label(one.kind_name(), one.name);
    text += (calls.empty() ? "" : ", ") + (label == operation ? "" : label + " of ") +
            collective_text(one);
    calls.emplace_back(one, rank(), world_size(), /*sums_narrow=*/!core->options.sum_in_fp32);
  }
  const uint64_t others = core->link->count_operation(core->members) - ++operations_;
  if (core->options.check_shapes == ShapeCheck::always && others > 0) {
    // See Note [Order on a device].
    text += ", after " + std::to_string(others) + " operations of other groups on the device";
  }
  const uint64_t sequence = core->enter_equal(operation, text);
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
  auto flight = std::make_shared<Flight>(core, operation, sequence, std::move(calls),
                                         std::move(work), device_);
  connections->add(flight);
  return Flight::handle(std::move(flight));
}

std::shared_ptr<Communicator> make_device_group(const BackendContext& context,
                                                DeviceBackendFactory factory) {
  at::Device device = context.options.device;
  if (!device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  auto group = std::make_shared<DeviceGroup>(context.link, context.options, std::vector<int>{},
                                             std::move(factory), device);
  group->connect_device();
  return group;
}

} // namespace hasten::detail
