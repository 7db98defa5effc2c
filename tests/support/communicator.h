// A communicator of its own for each case of a multi-rank test.
#pragma once

#include <memory>

#include "hasten/comm/communicator.h"

namespace hasten::testing_support {

/// A new group of all ranks of test_world(), named after the case and closed at
/// its end. Its timeout is 60 s, so that a late rank is named before the case's
/// own limit. Collective.
std::shared_ptr<Communicator> fresh_communicator();

/// The same with options of the caller.
std::shared_ptr<Communicator> fresh_communicator(const CommunicatorOptions& options);

} // namespace hasten::testing_support
