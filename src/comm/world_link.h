// What all groups of a world share: the store, the monitoring of the peers, Gloo's device, and the
// order in which ranks leave.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
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

class WorldLink {
 public:
  /// Joins the world: meets the peers and checks that all match.
  static std::shared_ptr<WorldLink> join(const World& world, const CommunicatorOptions& options);
  /// `generation` counts the worlds that this process has joined. `store` is the store's address.
  /// `server` is set on the rank that serves it.
  WorldLink(const World& world, const CommunicatorOptions& options, int generation,
            StoreAddress store, std::shared_ptr<StoreServer> server);
  /// The world of some of `before`'s ranks. `store` already has the keys of the heartbeats.
  WorldLink(const WorldLink& before, const std::vector<int>& members,
            std::shared_ptr<StoreThread> store, std::shared_ptr<StorePtr> watch_store);
  ~WorldLink();

  const World& world() const { return world_; }
  Liveness& liveness() { return *liveness_; }
  StoreThread& store() { return *store_; }
  /// The rank's number in messages: its rank when the first world began.
  int launch_rank(int rank) const { return hellos_[static_cast<size_t>(rank)].launch_rank; }
  int launch_rank() const { return launch_rank(world_.rank); }

  /// After a failure: creates the world of the remaining ranks and sets `members` to their ranks
  /// in this one. Null if all ranks remain. This world ends when its groups have.
  /// Collective over the remaining ranks. Throws like Communicator::shrink.
  std::shared_ptr<WorldLink> shrink(std::vector<int>& members);

  /// A device at options.interface_address, by default loopback if all ranks are on this host.
  /// Groups with the same address share one device.
  std::shared_ptr<gloo::transport::Device> device(const std::string& address);

  /// The user of a process of this host that is connected to the device, if it is neither this
  /// user nor root. Empty if there is none.
  std::optional<unsigned> stranger();

  /// Counts a new group. Throws InputError if the name was used before.
  void add_group(const std::string& name);
  /// Counts a closed group. Keeps its connections until the last group is closed, because ranks may
  /// close groups in different orders. After the last one, if `orderly`, all ranks meet and then
  /// leave, rank 0 last. Rank 0 waits for live peers up to the timeout, the others up to the
  /// heartbeat limit. Otherwise disconnects immediately; after a failure rank 0 stays up to a
  /// second so that all read the reason.
  void remove_group(c10::intrusive_ptr<c10d::Backend> connections, bool orderly);

 private:
  void shake_hands(const CommunicatorOptions& options);
  void start_watch();
  std::vector<int> agree_on_members(StoreThread& store);
  /// True if all ranks are ready to leave.
  bool meet();
  void part();
  /// Blocks at most `limit`.
  void disconnect(std::chrono::milliseconds limit);

  const World world_;
  const World first_world_; // the world in which the ranks joined the store
  const int generation_; // of the store's keys
  const int revision_ = 0; // how often the world has shrunk
  const std::chrono::milliseconds timeout_;
  const std::chrono::milliseconds liveness_limit_;
  const CommClock::time_point deadline_; // for joining
  const StoreAddress store_address_;
  std::shared_ptr<StoreServer> server_; // on the rank that serves the store
  std::vector<Hello> hellos_; // [rank]
  /// Liveness's connection, opened by the store's thread. Read after the handshake.
  const std::shared_ptr<StorePtr> watch_store_;
  std::shared_ptr<StoreThread> store_;
  std::shared_ptr<Liveness> liveness_;
  std::atomic<bool> shrunk_{false};
  std::mutex mutex_; // guards the members below
  std::set<std::string> names_;
  int open_groups_ = 0;
  std::string device_address_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::set<int> gloo_ports_; // at which the device listens
  std::vector<c10::intrusive_ptr<c10d::Backend>> closed_groups_;
};

} // namespace hasten::detail
