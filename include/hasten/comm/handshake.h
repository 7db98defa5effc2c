// What ranks tell each other when they meet, and the rules it must obey. For
// Communicator::create; nothing here communicates. Threading: free functions.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/base/world.h"

namespace hasten::detail {

/// One rank's introduction.
struct Hello {
  int rank = 0;
  /// What messages call it: its rank when the world began.
  int launch_rank = 0;
  int world_size = 1;
  std::string hasten_version;
  std::string torch_version;
  std::string device_kind;
  /// Boot and namespaces: equal where a process id means the same process.
  std::string process_host;
  /// Boot and network namespace: equal where loopback reaches the other.
  std::string network_host;
  /// The address at which this rank reaches the store, as digits; empty where all
  /// ranks are on one host.
  std::string store_address;
  int pid = 0;
  /// Clock ticks since boot at which the process started; tells it from a
  /// later process of the same number. 0 where /proc is not there.
  uint64_t start_time = 0;
};

Hello own_hello(const World& world, const std::string& device_kind);

nlohmann::json to_json(const Hello& hello);
Hello hello_from_json(const nlohmann::json& value);

/// "torch version: rank 1 has 2.12.0, rank 0 has 2.13.0" for the first field
/// that differs from rank 0's; empty while all that have arrived agree, or
/// rank 0 has not. [rank]
std::string first_difference(const std::vector<std::optional<Hello>>& hellos);

} // namespace hasten::detail
