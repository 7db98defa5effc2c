// The device of a run of tests: the CPU, or the one that HASTEN_TEST_DEVICE names in the environment:
// test_device (support/test_device.h), or cuda. Ranks inherit it, and share a GPU if they must.
//
//   HASTEN_TEST_DEVICE=test_device hasten_dist_tests --world 2 --gtest_filter=Ddp.*
//
// Tests make their tensors there (on_device.h). An Accelerator takes the device by itself
// (device=auto). not_on_device.txt lists the cases that do not run there.
#pragma once

#include <c10/core/Device.h>

namespace hasten::testing_support {

/// The device of this process: that of its local rank, if there are enough.
c10::Device run_device();

/// For main(): takes the device that the environment names. Operators use one thread if it is the
/// test device. Throws InputError if there is no such device.
void choose_run_device();

/// For main(), when its other listeners are there. A case fails if it leaves an error between
/// streams (take_device_errors). At the end of a run on the test device it prints which cases ran
/// no operator there.
void check_device_after_each_case();

} // namespace hasten::testing_support
