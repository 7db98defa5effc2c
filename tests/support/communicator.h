// A new communicator for each case of a multi-rank test.
#pragma once

#include <memory>

#include "hasten/comm/communicator.h"

namespace hasten::testing_support {

/// A new group of all ranks of test_world(). It has the case's name and is closed at the case's
/// end. The timeout is 60 s, which is shorter than the case's limit. So the error names a late
/// rank. Collective.
std::shared_ptr<Communicator> fresh_communicator();

/// The same with the caller's options.
std::shared_ptr<Communicator> fresh_communicator(const CommunicatorOptions& options);

/// For cases that count bytes: on the CPU over Gloo, so that no memory of its groups counts.
std::shared_ptr<Communicator> fresh_communicator_without_memory();

} // namespace hasten::testing_support
