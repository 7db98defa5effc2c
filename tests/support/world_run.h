// The two halves of a multi-rank test program; world_main.cpp joins them.
#pragma once

#include <string>
#include <vector>

namespace hasten::testing_support {

/// One rank: runs all cases, in step with the others. Returns the exit code.
int run_as_rank();

/// The parent: starts the ranks, prints what they report, starts them again
/// after a failed case. Never calls torch. Returns the exit code.
int run_as_parent(int world_size, const std::vector<std::string>& argv);

/// Seconds a case has (HASTEN_TEST_CASE_SECONDS, else 300). Cases take a few; a machine
/// whose host runs others first needs twenty times that now and then.
double case_seconds();

/// A rank whose watchdog fired.
inline constexpr int kWatchdogExit = 86;
/// A rank that leaves after a failed case, for the world to be started again.
inline constexpr int kFailedCaseExit = 87;

} // namespace hasten::testing_support
