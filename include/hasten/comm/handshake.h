// The facts that ranks exchange when they meet, and the check that they match. Used by
// Communicator::create. Nothing here communicates. Threading: free functions.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/base/world.h"

namespace hasten::detail {

/// The facts of one rank.
struct Hello {
  int rank = 0;
  /// The rank's number when the world began. Messages use it.
  int launch_rank = 0;
  int world_size = 1;
  std::string hasten_version;
  std::string torch_version;
  std::string device_kind;
  std::string backend;
  /// By name: what else decides how the ranks communicate.
  std::map<std::string, std::string> options;
  /// Boot id and PID namespace. If equal, a process id means the same process.
  std::string process_host;
  /// Boot id and network namespace. If equal, loopback reaches the other rank.
  std::string network_host;
  /// The numeric address from which this rank connects to the store. Empty if all ranks are on
  /// one host.
  std::string store_address;
  int pid = 0;
  /// Start time of the process in clock ticks since boot. It distinguishes the process from a
  /// later one with the same id. 0 without /proc.
  uint64_t start_time = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Hello, rank, launch_rank, world_size,
                                                hasten_version, torch_version, device_kind, backend,
                                                options, process_host, network_host, store_address,
                                                pid, start_time)

Hello own_hello(const World& world, const std::string& device_kind, const std::string& backend,
                std::map<std::string, std::string> options = {});

/// The first field in which a rank differs from rank 0, as "torch version: rank 1 has 2.12.0,
/// rank 0 has 2.13.0". Empty while all ranks that have arrived agree, or rank 0 has not arrived.
/// hellos: [rank]
std::string first_difference(const std::vector<std::optional<Hello>>& hellos);

/// The ranks of a host, or of a container, by the hosts' names: [host][place], ascending; hosts in the
/// order of their first rank. names: [rank]
std::vector<std::vector<int>> ranks_by_host(const std::vector<std::string>& names);

} // namespace hasten::detail
