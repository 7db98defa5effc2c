// A group of two halves: the operations of a device go through a back end of c10d that moves its
// memory (NCCL), everything else through Gloo. The halves share one GroupCore, and so the order of
// operations, the checks and the first error.
#pragma once

#include <memory>
#include <vector>

#include "device_watch.h"
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

} // namespace hasten::detail
