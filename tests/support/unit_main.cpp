#include <gtest/gtest.h>

#include "support/run_device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  hasten::testing_support::choose_run_device();
  hasten::testing_support::check_device_after_each_case();
  return RUN_ALL_TESTS();
}
