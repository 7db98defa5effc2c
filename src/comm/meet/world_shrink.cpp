// Shrinks a world to the remaining ranks.
//
// Note [Shrinking]
// The store outlives the world. The remaining ranks connect to it again, under new keys. Each
// writes that it is present. The first rank that sees every rank as present or lost (Liveness of
// the old world still runs) proposes the list of present ranks. The first proposal counts for all.
// There is no handshake, because the members know each other from the old world. The keys of the
// new Liveness exist before it starts. So from the decision on, a member that dies is a failure of
// the new world on every member, and they shrink again.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "world_link.h"

namespace hasten::detail {

using std::chrono::milliseconds;

constexpr const char* kShrinkWhere = "comm::shrink";
constexpr const char* kShrinkMembers = "members";

/// `before`, reduced to some of its ranks.
static WorldRanks ranks_of_members(const WorldRanks& before, const std::vector<int>& members) {
  WorldRanks left = before;
  World& world = left.world;
  const std::string& host = before.hellos[static_cast<size_t>(world.rank)].process_host;
  world.rank = static_cast<int>(std::ranges::find(members, world.rank) - members.begin());
  world.world_size = static_cast<int>(members.size());
  world.local_world_size = 0;
  left.hellos.clear();
  for (const int member : members) {
    Hello hello = before.hellos[static_cast<size_t>(member)];
    hello.rank = static_cast<int>(left.hellos.size());
    hello.world_size = world.world_size;
    world.local_world_size += hello.process_host == host;
    left.hellos.push_back(std::move(hello));
  }
  return left;
}

/// Runs in the store's thread. Returns the members; empty if cancelled.
std::vector<int> decide_members(c10d::Store& store, const std::atomic<bool>& cancelled,
                                const Liveness& liveness, int rank,
                                CommClock::time_point deadline) {
  const auto here_key = [](size_t i) { return "here/" + std::to_string(i); };
  store.set(here_key(static_cast<size_t>(rank)), std::string("1"));
  std::vector<bool> here(liveness.lost().size());
  StorePause pause;
  while (!cancelled) {
    if (store.check({kShrinkMembers})) {
      return parse_json("comm::shrink", kShrinkMembers, store.get_to_str(kShrinkMembers));
    }
    const std::vector<bool> lost = liveness.lost();
    std::vector<int> members;
    bool complete = true;
    for (size_t i = 0; i < here.size(); ++i) {
      here[i] = here[i] || store.check({here_key(i)});
      complete = complete && (here[i] || lost[i]);
      if (here[i] && !lost[i]) {
        members.push_back(static_cast<int>(i));
      }
    }
    if (complete || CommClock::now() > deadline) {
      store.compareSet(kShrinkMembers, std::string(), nlohmann::json(members).dump());
      continue; // the first proposal counts
    }
    pause();
  }
  return {};
}

/// Called by all remaining ranks.
std::vector<int> WorldLink::agree_on_members(StoreThread& store) {
  const CommClock::time_point deadline = CommClock::now() + ranks_.timeout;
  const auto refuse_without_store = [this] {
    if (!launcher_serves(world()) && world().rank != 0 && liveness_->lost()[0]) {
      throw CommunicationError(
          kShrinkWhere,
          liveness_->cause().text +
              "; the remaining ranks cannot continue without rank 0, which serves their store",
          "rank 0 to be alive", "restart from the last checkpoint");
    }
  };
  refuse_without_store();
  std::future<std::vector<int>> future =
      store.post<std::vector<int>>([liveness = liveness_, rank = world().rank, deadline](
                                       c10d::Store& s, const std::atomic<bool>& cancelled) {
        return decide_members(s, cancelled, *liveness, rank, deadline);
      });
  std::vector<int> members;
  std::string why = "the store does not answer";
  const bool met = await_future(future, deadline + milliseconds(2000), [&] {
    throw_if_interrupted();
    refuse_without_store();
  });
  try {
    members = met ? future.get() : members;
  } catch (const std::exception& error) {
    refuse_without_store();
    why = error.what();
    why = why.substr(0, why.find('\n'));
  }
  if (members.empty()) {
    throw CommunicationError(kShrinkWhere, "the remaining ranks have not met within " +
                                               std::to_string(ranks_.timeout.count()) + " ms (" +
                                               why + ")");
  }
  const bool own = std::ranges::find(members, world().rank) != members.end();
  if (!own || (!launcher_serves(world()) && members[0] != 0)) {
    throw CommunicationError(kShrinkWhere,
                             own ? "rank 0, which serves the store, has not come within " +
                                       std::to_string(ranks_.timeout.count()) + " ms"
                                 : "the other ranks continue without rank " +
                                       std::to_string(launch_rank()) +
                                       ": it was late, or they took it for dead",
                             "every live rank to call shrink() within the timeout",
                             "find out what that rank was doing, or raise the timeout");
  }
  return members;
}

std::shared_ptr<WorldLink> WorldLink::shrink(std::vector<int>& members) {
  WorldRanks ranks = ranks_;
  ++ranks.revision;
  const StoreConnections store(ranks, CommClock::now() + ranks.timeout);
  try {
    members = agree_on_members(*store.thread);
  } catch (...) {
    store.thread->stop(milliseconds(0));
    throw;
  }
  if (std::ssize(members) == world().world_size) {
    return nullptr;
  }
  std::future<bool> keys =
      store.thread->post<bool>([size = members.size()](c10d::Store& s, const std::atomic<bool>&) {
        const std::string none; // sets only keys that do not exist: a member may have set them
        for (size_t i = 0; i < size; ++i) {
          s.compareSet(Liveness::beat_key(static_cast<int>(i)), none,
                       std::string(Liveness::kFirstBeat));
        }
        s.compareSet(Liveness::kFailureKey, none, std::string(Liveness::kNoFailure));
        return true;
      });
  if (!await_future(keys, CommClock::now() + ranks_.timeout, throw_if_interrupted)) {
    throw CommunicationError(kShrinkWhere, "the store does not answer");
  }
  keys.get();
  auto link = std::make_shared<WorldLink>(ranks_of_members(ranks, members), store);
  shrunk_ = true;
  return link;
}

} // namespace hasten::detail
