// What all groups of one world share: the store, the watch over the peers, the
// device Gloo listens on, and the order in which ranks part.
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
  /// Meets the peers and verifies that all are of one kind.
  static std::shared_ptr<WorldLink> join(const World& world, const CommunicatorOptions& options);
  /// `generation` counts the worlds that this process has joined. The store is at
  /// `store`; `server` is it on the rank that serves it.
  WorldLink(const World& world, const CommunicatorOptions& options, int generation,
            StoreAddress store, std::shared_ptr<StoreServer> server);
  /// The world of some of `before`'s ranks, behind `store`, in which the watch's
  /// keys exist.
  WorldLink(const WorldLink& before, const std::vector<int>& members,
            std::shared_ptr<StoreThread> store, std::shared_ptr<StorePtr> watch_store);
  ~WorldLink();

  const World& world() const { return world_; }
  Liveness& liveness() { return *liveness_; }
  StoreThread& store() { return *store_; }
  /// What messages call a rank: its number when the first world began.
  int launch_rank(int rank) const { return hellos_[static_cast<size_t>(rank)].launch_rank; }
  int launch_rank() const { return launch_rank(world_.rank); }

  /// After a failure: the world of those that are left, `members` of this one's
  /// ranks; null where these are all. This world goes once its groups have.
  /// Collective over them. Throws as Communicator::shrink.
  std::shared_ptr<WorldLink> shrink(std::vector<int>& members);

  /// A device on options.interface_address, by default loopback where all
  /// ranks are on this host. One for all groups with the same address.
  std::shared_ptr<gloo::transport::Device> device(const std::string& address);

  /// The user of a process of this host that is connected to the device and is neither
  /// this one's nor root; nothing where there is none.
  std::optional<unsigned> stranger();

  /// Counts a group in. Throws InputError where the name was used before.
  void add_group(const std::string& name);
  /// Counts a group out and keeps what it connected until the last one goes:
  /// ranks may close their groups in different orders. After the last, if
  /// `orderly`, all ranks meet and part, rank 0 last, which waits for living
  /// peers up to the timeout, others for the liveness limit. After a failure
  /// rank 0 stays up to a second, so that the reason reaches all. Else lets go
  /// at once.
  void remove_group(c10::intrusive_ptr<c10d::Backend> connections, bool orderly);

 private:
  void shake_hands(const CommunicatorOptions& options);
  void start_watch();
  std::vector<int> agree_on_members(StoreThread& store);
  /// True where all ranks want to part.
  bool meet();
  void part();
  /// Bounded by `limit`.
  void disconnect(std::chrono::milliseconds limit);

  const World world_;
  const World first_world_; // in which the store was met
  const int generation_; // of the store's keys, and how often this one shrank
  const int revision_ = 0;
  const std::chrono::milliseconds timeout_;
  const std::chrono::milliseconds liveness_limit_;
  const CommClock::time_point deadline_; // for joining
  const StoreAddress store_address_;
  std::shared_ptr<StoreServer> server_; // on the rank that serves the store
  std::vector<Hello> hellos_; // [rank]
  /// The watch's connection, from the store's thread. Read after the handshake.
  const std::shared_ptr<StorePtr> watch_store_;
  std::shared_ptr<StoreThread> store_;
  std::shared_ptr<Liveness> liveness_;
  std::atomic<bool> shrunk_{false};
  std::mutex mutex_; // of what follows
  std::set<std::string> names_;
  int open_groups_ = 0;
  std::string device_address_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::set<int> gloo_ports_; // at which it listens
  std::vector<c10::intrusive_ptr<c10d::Backend>> closed_groups_;
};

} // namespace hasten::detail
