// For authors of tests that run on several ranks (hasten_tests(dist …)).
//
// The whole binary runs as N processes that go through the same cases in the
// same order. A case passes when it passes on every rank; after one that does
// not, the ranks are started afresh with the next case. Torch is seeded with
// rank + 1 before each case, so ranks differ until something makes them equal.
// A case has 300 s. Every rank must run, or skip, the same cases.
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

/// Who this process is. Its port and descriptor serve one group; further ones
/// need fresh_world().
const World& test_world();

/// The same ranks with a store port of their own, which nobody has used; also
/// put into the environment, for code that calls world_from_environment().
/// Collective.
World fresh_world();

/// A store for this case alone, served by the harness, not by what is tested.
c10::intrusive_ptr<c10d::Store> test_store();

/// "Suite.Case" of the case that runs now; the same on all ranks.
std::string case_name();

/// Called, last first, when the case has passed on all ranks. After a failure
/// the process ends without it: nothing there may be waited for.
void at_case_end(std::function<void()> function);

} // namespace hasten::testing_support
