#include "support/communicator.h"

#include <gtest/gtest.h>

#include "hasten/comm/backend.h"
#include "support/device_communicator.h"
#include "support/run_device.h"
#include "support/world.h"

namespace hasten::testing_support {

/// On the test device, groups run its collectives on streams, as NCCL does.
class DeviceBackend : public testing::Environment {
  void SetUp() override {
    if (!run_device().is_cpu()) {
      register_backend("gloo", [gloo = backend_factory("gloo")](const BackendContext& context) {
        return device_communicator(gloo(context));
      });
    }
  }
};
[[maybe_unused]] static testing::Environment* const device_backend =
    testing::AddGlobalTestEnvironment(new DeviceBackend); // owned by gtest

std::shared_ptr<Communicator> fresh_communicator() {
  CommunicatorOptions options;
  options.timeout = std::chrono::seconds(60);
  options.name = case_name();
  return fresh_communicator(options);
}

std::shared_ptr<Communicator> fresh_communicator(const CommunicatorOptions& options) {
  auto communicator = Communicator::create(fresh_world(), options);
  at_case_end([communicator] { communicator->close(); });
  return communicator;
}

} // namespace hasten::testing_support
