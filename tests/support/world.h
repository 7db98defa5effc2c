// For authors of tests that run on several ranks (hasten_tests(dist …)).
//
// The binary runs as N processes that run the same cases in the same order. A case passes if it
// passes on every rank. After a case that fails, new ranks start with the next case. Torch's seed
// is rank + 1 before each case, so ranks differ until something makes them equal. A case may take
// 300 s. Every rank must run, or skip, the same cases.
//
//   TEST(Ddp, RanksStartEqual) {
//     auto communicator = testing_support::fresh_communicator();
//     ...
//   }
//   hasten_dist_tests --world 3 --gtest_filter=Ddp.*
#pragma once

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hasten/base/world.h"

namespace hasten::testing_support {

/// This process's world. Its port and descriptor are for one group; other groups need
/// fresh_world().
const World& test_world();

/// The same ranks with a new port for the store. Also sets the environment, for code that calls
/// world_from_environment(). Collective.
World fresh_world();

/// A store for this case only. The harness serves it, not the tested code.
c10::intrusive_ptr<c10d::Store> test_store();

/// "Suite.Case" of the current case; equal on all ranks.
std::string case_name();

/// Calls the function after the case has passed on all ranks, in reverse order. After a failure the
/// process ends without the call, because the function might wait for another rank.
void at_case_end(std::function<void()> function);

} // namespace hasten::testing_support
