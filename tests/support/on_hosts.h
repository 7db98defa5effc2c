// Ranks that believe to be on several hosts, whatever the harness says.
#pragma once

#include <memory>
#include <vector>

#include "hasten/comm/forwarding_communicator.h"
#include "support/communicator.h"

namespace hasten::testing_support {

struct OnHosts : ForwardingCommunicator {
  /// `hosts`: [rank] its host.
  OnHosts(std::shared_ptr<Communicator> inner, std::vector<int> hosts)
      : ForwardingCommunicator(std::move(inner)), hosts_(std::move(hosts)) {}
  int host() const { return hosts_.at(static_cast<size_t>(rank())); }

 protected:
  std::vector<int> host_members() const override {
    std::vector<int> members;
    for (int other = 0; other < world_size(); ++other) {
      if (hosts_.at(static_cast<size_t>(other)) == host()) {
        members.push_back(other);
      }
    }
    return members;
  }

 private:
  std::vector<int> hosts_;
};

/// Collective.
inline std::shared_ptr<OnHosts> on_hosts(std::vector<int> hosts) {
  return std::make_shared<OnHosts>(fresh_communicator(), std::move(hosts));
}

/// The world's first ranks are on host 0, the others on host 1.
inline std::vector<int> two_hosts(int world_size) {
  std::vector<int> hosts;
  for (int rank = 0; rank < world_size; ++rank) {
    hosts.push_back(rank * 2 / world_size);
  }
  return hosts;
}

} // namespace hasten::testing_support
