#include "support/communicator.h"

#include "support/world.h"

namespace hasten::testing_support {

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
