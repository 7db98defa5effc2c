// The device of a run of tests: the CPU, or the test device if the environment has
// HASTEN_TEST_DEVICE=1. Ranks inherit it.
//
//   HASTEN_TEST_DEVICE=1 hasten_dist_tests --world 2 --gtest_filter=Ddp.*
//
// Tests make their tensors there (on_device.h). An Accelerator takes the device by itself
// (device=auto). not_on_device.txt lists the cases that do not run there.
#pragma once

#include <c10/core/Device.h>

namespace hasten::testing_support {

/// The device of this process. The test device of a rank has the rank's number.
c10::Device run_device();

/// For main(): installs the test device if the environment says so. Operators then use one thread.
void choose_run_device();

/// For main(), when its other listeners are there. A case fails if it leaves an error between
/// streams (take_device_errors). At the end of a run on the test device it prints which cases ran
/// no operator there.
void check_device_after_each_case();

} // namespace hasten::testing_support
