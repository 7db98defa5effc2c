// Back ends: what moves the tensors of a group. CommunicatorOptions::backend chooses one by name,
// like the `backend` of torch.distributed.init_process_group. hasten has "shm" for the ranks of one
// host, "gloo", and "nccl" for CUDA. A program may register others before it creates a Communicator:
// a whole Communicator, or a c10d::Backend for the memory of a type of device.
// Threading: free functions, any thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hasten/base/world.h"
#include "hasten/comm/communicator.h"

namespace c10d {
class Backend;
class Store;
} // namespace c10d

namespace hasten {

namespace detail {
class WorldLink;
} // namespace detail

/// What a back end makes the first group of a world from. The ranks have met and have compared
/// their facts.
struct BackendContext {
  /// With the address at which this rank found the store.
  const World& world;
  const CommunicatorOptions& options;
  /// Store, monitoring of the peers and shutdown, which all groups of the world share. For back
  /// ends inside hasten. Others make a "gloo" group of the context and use its collectives to
  /// exchange their addresses.
  std::shared_ptr<detail::WorldLink> link;
};

/// Creates the group of all ranks of a world of several. Collective. The group's duplicate() and
/// new_group() make groups of the same back end.
using BackendFactory = std::function<std::shared_ptr<Communicator>(const BackendContext& context)>;

/// Makes `factory` known as `name`, on every rank that uses it. Replaces a factory of that name.
/// Local. Throws InputError if `name` or `factory` is empty.
void register_backend(const std::string& name, BackendFactory factory);

/// What a back end of a device makes one group's connections from.
struct DeviceBackendContext {
  /// For addresses. The groups of the world share its connection. A call that waits on it delays
  /// the others, so wait in the factory only.
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  at::Device device;
  const CommunicatorOptions& options;
};

/// Makes a c10d::Backend that has its connections: the ranks call it together, each in a thread of
/// its own whose current device is the group's. Of the back end it needs the collectives of c10d,
/// whose Work makes the current stream wait (wait, synchronize) and says by isCompleted() whether
/// it has ended, and abort(), which any thread may call, and which ends operations that run.
/// startCoalescing() and getError() are used if it has them.
using DeviceBackendFactory =
    std::function<c10::intrusive_ptr<c10d::Backend>(const DeviceBackendContext& context)>;

/// Makes `factory` known as `name` for tensors of devices of this type; "auto" then means it there.
/// Everything else goes through "shm" or "gloo". Otherwise like register_backend().
void register_device_backend(const std::string& name, at::DeviceType type,
                             DeviceBackendFactory factory);

/// The back end that `name` means on `device`: "auto" is the last one that was registered for its
/// type. Without one it stays "auto", until the ranks have met. Local. Throws InputError for a name that is not known, and for a
/// back end of another type of device.
std::string resolved_backend(const std::string& name, const at::Device& device);

/// Whether a group of that back end copies tensors of a device to the host, so that ranks may share a
/// device. False for "auto", and for names that are not known. Local.
bool moves_host_memory(const std::string& name);

/// The names of all back ends, sorted.
std::vector<std::string> backend_names();

/// The factory of back end `name`. Throws InputError that lists the names if there is none.
BackendFactory backend_factory(const std::string& name);

} // namespace hasten
