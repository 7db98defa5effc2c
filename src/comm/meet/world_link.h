// What all groups of a world share: the store, the monitoring of the peers, Gloo's device, and the
// order in which ranks leave.
#pragma once

#include <c10/util/Synchronized.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "hasten/comm/communicator.h"
#include "liveness.h"
#include "store.h"

namespace gloo::transport {
class Device;
}

namespace hasten::detail {

/// Waits for `future`, calling `poll` (which may throw) about every 20 ms.
/// False once `deadline` has passed.
template <typename T, typename Poll>
bool await_future(std::future<T>& future, CommClock::time_point deadline, const Poll& poll) {
  while (future.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
    poll();
    if (CommClock::now() > deadline) {
      return false;
    }
  }
  return true;
}

/// The ranks of a world, and where they meet.
struct WorldRanks {
  World world{};
  World first_world{}; // the world in which the ranks joined the store
  int generation = 0; // counts the worlds that this process has joined
  int revision = 0; // how often the world has shrunk
  std::chrono::milliseconds timeout{};
  std::chrono::milliseconds heartbeat_timeout{};
  StoreAddress store{};
  std::shared_ptr<StoreServer> server{}; // on the rank that serves the store
  std::vector<Hello> hellos{}; // [rank] empty before the handshake

  /// The prefix of the store's keys, because a store outlives a world.
  std::string keys() const {
    return std::to_string(generation) + (revision > 0 ? "/world " + std::to_string(revision) : "");
  }
};

/// Connections to the store. The thread opens Liveness's connection, too, before any function that
/// is posted to it runs.
struct StoreConnections {
  StoreConnections(const WorldRanks& ranks, CommClock::time_point deadline);
  std::shared_ptr<StorePtr> watch = std::make_shared<StorePtr>();
  std::shared_ptr<StoreThread> thread;
};

/// The ranks of a group by their hosts. [host][index on it]
using Hosts = std::vector<std::vector<int>>;

/// A group that this rank has closed, and what owns its connections.
struct ClosedGroup {
  std::shared_ptr<GroupProgress> progress{};
  int world_size = 0;
  std::vector<std::shared_ptr<void>> connections{};
};

using MembersDecision = std::function<std::optional<std::vector<int>>(
    c10d::Store&, const std::atomic<bool>& cancelled)>;

/// For StoreThread::post_until, on each remaining rank: which ranks are in the shrunk world. Decided
/// when every rank is present or `lost`, or at the deadline. Then the keys of Liveness exist.
MembersDecision decide_members(int rank, const std::function<std::vector<bool>()>& lost,
                               CommClock::time_point deadline);

class WorldLink {
 public:
  /// Joins the world: meets the peers and checks that all match. `transport`: see Hello::options.
  static std::shared_ptr<WorldLink> join(const World& world, const CommunicatorOptions& options,
                                         std::map<std::string, std::string> transport = {});
  /// The ranks have met. The store has the keys of the heartbeats.
  WorldLink(WorldRanks ranks, const StoreConnections& store);

  const World& world() const { return ranks_.world; }
  Liveness& liveness() { return *liveness_; }
  StoreThread& store() { return *store_; }
  /// The rank's number in messages: its rank when the first world began.
  int launch_rank(int rank) const { return ranks_.hellos[static_cast<size_t>(rank)].launch_rank; }
  int launch_rank() const { return launch_rank(world().rank); }

  /// After a failure: creates the world of the remaining ranks and sets `members` to their ranks
  /// in this one. Null if all ranks remain. This world ends when its groups have.
  /// Collective over the remaining ranks. Throws like Communicator::shrink.
  std::shared_ptr<WorldLink> shrink(std::vector<int>& members);

  /// Whether two of these ranks are on different hosts.
  bool on_hosts(const std::vector<int>& members) const;
  /// The indices of those of these ranks that are on this rank's host.
  std::vector<int> beside(const std::vector<int>& members) const;
  /// The indices of these ranks, those that see each other's processes together: the ranks of a host,
  /// or of a container. Ascending; hosts in the order of their first rank.
  Hosts by_host(const std::vector<int>& members) const;
  /// Which of these ranks see different processes, because they are on different hosts or in
  /// different containers. Empty if all see the same.
  std::string apart(const std::vector<int>& members) const;
  /// True the first time: the log says once in a world why the ranks do not share memory.
  bool first_to_say_why() { return !said_why_.exchange(true); }

  /// A device at options.interface_address, by default loopback if all ranks are on this host.
  /// Groups with the same address share one device.
  std::shared_ptr<gloo::transport::Device> device(const std::string& address);

  /// The user of a process of this host that is connected to the device, if it is neither this
  /// user nor root. Empty if there is none.
  std::optional<unsigned> stranger();

  /// Counts a new group. Returns what only this group is called in the store, on all its ranks.
  std::string add_group(const std::string& name, const std::vector<int>& members);
  int open_groups();
  /// Counts a closed group. Keeps its connections until all its ranks have closed it, because they
  /// may close groups in different orders. After the last group, if `orderly`, all ranks meet and
  /// then leave, rank 0 last. Rank 0 waits for live peers up to the timeout, the others up to the
  /// heartbeat limit. Otherwise disconnects immediately; after a failure rank 0 stays up to a
  /// second so that all read the reason.
  void remove_group(ClosedGroup closed, bool orderly);
  /// How many operations groups of these ranks have started on a device, with the one that asks.
  uint64_t count_operation(const std::vector<int>& members);

 private:
  std::vector<int> agree_on_members(StoreThread& store);
  /// True if all ranks are ready to leave.
  bool meet();
  void part();
  void end_closed_groups(const std::string& latest);
  /// Blocks at most `limit`.
  void disconnect(std::chrono::milliseconds limit);

  WorldRanks ranks_; // set at construction, but for the server
  const std::shared_ptr<StoreThread> store_;
  const std::shared_ptr<Liveness> liveness_;
  using ClosedGroups = c10::Synchronized<std::vector<ClosedGroup>>;
  const std::shared_ptr<ClosedGroups> closed_groups_ = std::make_shared<ClosedGroups>();
  std::atomic<bool> shrunk_{false};
  std::atomic<bool> said_why_{false};
  std::mutex mutex_; // guards the members below
  std::map<std::string, int> names_; // how many groups have had it
  int open_groups_ = 0;
  std::string device_address_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::set<int> gloo_ports_; // at which the device listens
  std::map<std::vector<int>, uint64_t> operations_; // by members
};

} // namespace hasten::detail
