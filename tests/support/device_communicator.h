// Collectives on tensors of the test device.
#pragma once

#include <memory>

#include "hasten/comm/communicator.h"

namespace hasten::testing_support {

/// A communicator whose collectives take tensors of the test device, and tensors of the CPU as
/// `inner` does. As with NCCL, a collective runs on a stream that belongs to the communicator.
/// start() orders it after the caller's stream, and Work::wait() orders the caller's stream after
/// it. So code that uses a tensor before wait() is an error of take_device_errors(). If the last
/// handle goes without wait(), the tensors that it would have written are full of NaN.
/// Also for the groups that duplicate() and new_group() make.
std::shared_ptr<Communicator> device_communicator(std::shared_ptr<Communicator> inner);

} // namespace hasten::testing_support
