// What other commands take of hasten estimate-memory. Private to src/cli.
#pragma once

#include <cstdint>

#include "hasten/cli/commands.h"

namespace hasten::detail {

/// Bytes of one process at its fullest.
int64_t estimated_peak_bytes(const EstimateMemoryCommand& command);

} // namespace hasten::detail
