// main() of the tests on the test device. It fails a test that leaves an error between streams.
#include <gtest/gtest.h>

#include "support/rank_process.h"
#include "support/spawn.h"
#include "support/test_device.h"

namespace hasten::testing_support {

class DeviceListener : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo&) override {
    set_device_memory_limit(0);
    for (const std::string& error : take_device_errors()) {
      ADD_FAILURE() << error;
    }
  }
};

} // namespace hasten::testing_support

int main(int argc, char** argv) {
  using namespace hasten::testing_support;
  testing::InitGoogleTest(&argc, argv);
  install_test_device();
  if (is_rank_process()) {
    return run_rank_function();
  }
  testing::UnitTest::GetInstance()->listeners().Append(new DeviceListener); // owned by gtest
  return RUN_ALL_TESTS();
}
