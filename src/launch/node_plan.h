// What the launchers of several hosts exchange when they meet, and what follows from it: which
// host is which node. Nothing here communicates. Internal to launch.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/base/store_channel.h"
#include "hasten/launch/launch.h"

namespace hasten::detail {

/// One host's launcher.
struct Node {
  std::string host;
  int pid = 0;
  int nproc = 1;
  int node_rank = -1; // as asked for
  /// What must be equal, by name.
  std::map<std::string, std::string> same;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Node, host, pid, nproc, node_rank, same)

/// This host's launcher.
Node own_node(const LaunchOptions& options);

/// Why these launchers cannot work together: what differs from the first one, or a node rank that two
/// have. Names the hosts. Empty if they can.
std::string why_not_together(const std::vector<Node>& nodes, int max_nodes);

/// The order in which they are nodes: the first, then by the node ranks that they asked for, else by
/// host name. Indices of `nodes`.
std::vector<size_t> node_order(const std::vector<Node>& nodes);

/// "a (node rank 0), b (node rank 2); missing: node ranks 1, 3".
std::string who_has_come(const std::vector<Node>& nodes, const RendezvousOptions& options);

/// The ranks of this host in the world, and where the world meets.
struct LaunchWorld {
  int node = 0;
  int nodes = 1;
  int first_rank = 0;
  int world_size = 1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  StoreAddress store{};
  std::string rdzv_id = "none";
  std::vector<std::string> hosts{}; // [node] "b (node 1, ranks 2-3)"
};

/// The nodes' hosts with their ranks, in the order of the nodes.
std::vector<std::string> node_texts(const std::vector<Node>& nodes);

} // namespace hasten::detail
