// Collectives on tensors of the test device: a back end of c10d that stands in for NCCL.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>

#include "hasten/base/world.h"
#include "hasten/comm/communicator.h"

namespace hasten::testing_support {

/// Makes "test", the back end of the test device. Its collectives run on a stream of the group, on
/// copies that Gloo moves. As with NCCL:
/// - start() orders it after the caller's stream, and Work::wait() orders the caller's stream after
///   it. So code that uses a tensor before wait() is an error of take_device_errors(). If the last
///   handle goes without wait(), the tensors that it would have written are full of NaN.
/// - An operation whose peer is gone neither ends nor fails. It ends with abort() of the back end.
///   The host waits for it in Work::wait(), because operators of the device run at once.
void register_test_backend();

/// The group of a world on the test device, which uses its back end. The rank's device is that with
/// its local rank, or `device`.
std::shared_ptr<Communicator> device_world(const World& world, std::optional<int> device = {},
                                           CommunicatorOptions options = {});

/// How many group calls the back ends have made: operations that started as one.
int device_group_calls();

} // namespace hasten::testing_support
