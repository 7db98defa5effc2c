// Shrinks a world to the remaining ranks.
//
// Note [Shrinking]
// The store outlives the world. The remaining ranks connect to it again, under new keys. Each adds
// its number to one list. The first rank that sees every rank as listed or lost (Liveness of the
// old world still runs) proposes the list of present ranks. The first proposal counts for all.
// There is no handshake, because the members know each other from the old world. Who proposes sets
// the keys of the new Liveness before. So from the decision on, a member that dies is a failure of
// the new world on every member, and they shrink again.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "world_link.h"

namespace hasten::detail {

using std::chrono::milliseconds;

constexpr const char* kShrinkWhere = "comm::shrink";
constexpr const char* kShrinkPresent = "here";
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

MembersDecision decide_members(int rank, const std::function<std::vector<bool>()>& lost,
                               CommClock::time_point deadline) {
  return [=, said = false](c10d::Store& store,
                           const auto&) mutable -> std::optional<std::vector<int>> {
    if (!std::exchange(said, true)) {
      const std::string text = std::to_string(rank) + ' ';
      store.append(kShrinkPresent, {text.begin(), text.end()});
    }
    if (store.check({kShrinkMembers})) {
      const std::string text = store.get_to_str(kShrinkMembers);
      return parse_json(kShrinkWhere, kShrinkMembers, text).get<std::vector<int>>();
    }
    std::vector<bool> known = lost();
    std::vector<int> members;
    std::istringstream present(store.get_to_str(kShrinkPresent));
    for (size_t i = 0; present >> i;) {
      if (!known.at(i)) {
        members.push_back(static_cast<int>(i));
        known[i] = true;
      }
    }
    if (std::ranges::count(known, false) == 0 || CommClock::now() > deadline) {
      const std::string none; // sets only keys that do not exist: another may have proposed
      for (size_t i = 0; i < members.size(); ++i) {
        store.compareSet(Liveness::beat_key(static_cast<int>(i)), none,
                         std::string(Liveness::kFirstBeat));
      }
      store.compareSet(Liveness::kFailureKey, none, std::string(Liveness::kNoFailure));
      std::ranges::sort(members);
      store.compareSet(kShrinkMembers, none, nlohmann::json(members).dump());
    }
    return std::nullopt; // the first proposal counts
  };
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
  std::future<std::vector<int>> future = store.post_until<std::vector<int>>(
      decide_members(world().rank, [liveness = liveness_] { return liveness->lost(); }, deadline));
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
  auto link = std::make_shared<WorldLink>(ranks_of_members(ranks, members), store);
  shrunk_ = true;
  return link;
}

} // namespace hasten::detail
