// A check whose result may differ between ranks. All ranks make it. Either all continue, or all
// end with the same exit code and one of them reports the error. Private to src/cli.
#pragma once

#include <functional>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

/// Runs `stage` (local work that may throw) and agrees on the result. Collective: one exchange
/// through the store. Blocks until the slowest rank's stage has ended.
/// Throws on all ranks if any failed: the lowest rank that failed rethrows its error, the others
/// throw SilentExit with that error's exit code.
void agree_on(Communicator& communicator, std::string_view name,
              const std::function<void()>& stage);

} // namespace hasten::detail
