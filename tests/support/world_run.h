// The parent and the rank of a multi-rank test program. world_main.cpp chooses one of them.
#pragma once

#include <string>
#include <vector>

namespace hasten::testing_support {

/// A rank: runs all cases together with the other ranks. Returns the exit code.
int run_as_rank();

/// The parent: starts the ranks, prints their reports, and starts new ranks after a failed case.
/// Never calls torch. Returns the exit code.
int run_as_parent(int world_size, const std::vector<std::string>& argv);

/// Seconds that a case may take (HASTEN_TEST_CASE_SECONDS, or else 300). Cases take a few seconds.
/// On a busy host they sometimes take twenty times as long.
double case_seconds();

/// Exit code of a rank that its watchdog ended.
inline constexpr int kWatchdogExit = 86;
/// Exit code of a rank that ends after a failed case, so that a new world can start.
inline constexpr int kFailedCaseExit = 87;

} // namespace hasten::testing_support
