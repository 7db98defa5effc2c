// main() of the tests on the test device. It fails a test that leaves an error between streams.
#include <gtest/gtest.h>

#include "support/rank_process.h"
#include "support/run_device.h"
#include "support/spawn.h"
#include "support/test_device.h"

int main(int argc, char** argv) {
  using namespace hasten::testing_support;
  testing::InitGoogleTest(&argc, argv);
  install_test_device();
  if (is_rank_process()) {
    return run_rank_function();
  }
  check_device_after_each_case();
  return RUN_ALL_TESTS();
}
