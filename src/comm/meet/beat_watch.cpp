#include "beat_watch.h"

#include <algorithm>
#include <utility>

namespace hasten::detail {

using std::chrono::milliseconds;

// A rank is read by as many, because one of them may be slow.
constexpr size_t kNextHosts = 3;

std::vector<int> in_place_on_next_hosts(int rank, const std::vector<std::vector<int>>& hosts) {
  const auto has_rank = [rank](const std::vector<int>& host) {
    return std::ranges::find(host, rank) != host.end();
  };
  const auto own = std::ranges::find_if(hosts, has_rank);
  const auto place = static_cast<size_t>(std::ranges::find(*own, rank) - own->begin());
  std::vector<int> ranks;
  for (size_t next = 1; next <= std::min(kNextHosts, hosts.size() - 1); ++next) {
    const auto& host = hosts[(static_cast<size_t>(own - hosts.begin()) + next) % hosts.size()];
    for (size_t other = place; other < host.size(); other += own->size()) { // if it has more ranks
      ranks.push_back(host[other]);
    }
  }
  return ranks;
}

BeatWatch::BeatWatch(int rank, int size, std::vector<int> neighbours, milliseconds limit, Time now)
    : rank_(rank),
      interval_(std::max(std::clamp(limit / 20, milliseconds(50), milliseconds(1000)),
                         milliseconds(size))),
      limit_(std::max(limit, 5 * interval_)),
      neighbours_(std::move(neighbours)),
      seen_(static_cast<size_t>(size), Seen{"", now, now}),
      last_merge_(now) {}

void BeatWatch::waits_for(const std::vector<int>& group) {
  if (!group.empty()) {
    wanted_.insert(group.begin(), group[0] == rank_ ? group.end() : group.begin() + 1);
  }
}

std::vector<int> BeatWatch::due(bool all, Time now) {
  std::set<int> ranks = std::exchange(wanted_, {});
  ranks.insert(neighbours_.begin(), neighbours_.end());
  if (all && now - last_all_ >= milliseconds(5) * seen_.size()) {
    last_all_ = now;
    for (int rank = 0; std::cmp_less(rank, seen_.size()); ++rank) {
      ranks.insert(rank);
    }
  }
  ranks.erase(rank_);
  return {ranks.begin(), ranks.end()};
}

void BeatWatch::merge(const std::vector<int>& ranks, std::vector<std::string> beats, Time now) {
  // If this process was paused, missing heartbeats mean nothing.
  const bool slept = now - last_merge_ > 2 * interval_ + milliseconds(500);
  for (Seen& seen : seen_) {
    seen.changed = slept ? now : seen.changed;
  }
  last_merge_ = now;
  for (size_t i = 0; i < ranks.size(); ++i) {
    Seen& seen = seen_[static_cast<size_t>(ranks[i])];
    seen.changed = beats[i] != seen.beat ? now : seen.changed;
    seen.beat = std::move(beats[i]);
    seen.read = now;
  }
}

} // namespace hasten::detail
