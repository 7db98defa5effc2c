#include "support/communicator.h"

#include <gtest/gtest.h>

#include "support/device_backend.h"
#include "support/run_device.h"
#include "support/world.h"

namespace hasten::testing_support {

/// On the test device, groups run its collectives on streams, as on a GPU.
class DeviceBackend : public testing::Environment {
  void SetUp() override {
    if (run_device().is_privateuseone()) {
      register_test_backend();
    }
  }
};
[[maybe_unused]] static testing::Environment* const device_backend =
    testing::AddGlobalTestEnvironment(new DeviceBackend); // owned by gtest

static CommunicatorOptions case_options() {
  CommunicatorOptions options;
  options.timeout = std::chrono::seconds(60);
  options.name = case_name();
  return options;
}

std::shared_ptr<Communicator> fresh_communicator() { return fresh_communicator(case_options()); }

std::shared_ptr<Communicator> fresh_communicator_without_memory() {
  CommunicatorOptions options = case_options();
  options.backend = run_device().is_cpu() ? "gloo" : "auto";
  return fresh_communicator(options);
}

std::shared_ptr<Communicator> fresh_communicator(const CommunicatorOptions& options) {
  CommunicatorOptions placed = options;
  placed.device = run_device();
  auto communicator = Communicator::create(fresh_world(), placed);
  at_case_end([communicator] { communicator->close(); });
  return communicator;
}

} // namespace hasten::testing_support
