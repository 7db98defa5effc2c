// Back ends: what moves the tensors of a group. CommunicatorOptions::backend chooses one by name,
// like the `backend` of torch.distributed.init_process_group. hasten has "gloo". A program may
// register others before it creates a Communicator.
// Threading: free functions, any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hasten/base/world.h"
#include "hasten/comm/communicator.h"

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

/// The names of all back ends, sorted.
std::vector<std::string> backend_names();

/// The factory of back end `name`. Throws InputError that lists the names if there is none.
BackendFactory backend_factory(const std::string& name);

} // namespace hasten
