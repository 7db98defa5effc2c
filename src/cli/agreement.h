// A check whose outcome may differ between ranks, made by all of them: either
// all go on, or all end with the same exit code and one of them says why.
// Private to src/cli.
#pragma once

#include <functional>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

/// Runs `stage` (local work that may throw) and agrees on how it went.
/// Collective: one exchange through the store. Blocks until the slowest rank's
/// stage has ended.
/// Throws on all ranks if any failed: on the first that failed the error itself
/// (InputError keeps its kind), on the others SilentExit with its exit code.
void agree_on(Communicator& communicator, std::string_view name,
              const std::function<void()>& stage);

} // namespace hasten::detail
