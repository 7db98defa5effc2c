// hasten compare, as `hasten` runs it: a world for each strategy, one after the other.
// Private to src/cli. Without LibTorch.
#pragma once

#include <functional>
#include <string>

#include "commands.h"
#include "hasten/launch/launch.h"

namespace hasten::detail {

/// Starts the ranks of a world with this text as CompareTask::kVariable and waits for
/// their end.
using StartWorld = std::function<LaunchResult(const std::string& task)>;

/// A world ended for another reason than memory; the ranks said why, or a signal did.
struct WorldFailed {
  LaunchResult result{};
};

/// Measures, prints the table and writes the JSON. Returns an exit code.
/// Throws InputError where no strategy fits, behind the table; WorldFailed.
int compare_strategies(const CompareCommand& command, const StartWorld& start_world);

} // namespace hasten::detail
