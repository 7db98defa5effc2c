#include "beat_watch.h"

#include <algorithm>
#include <utility>

namespace hasten::detail {

using std::chrono::milliseconds;

BeatWatch::BeatWatch(int rank, int size, milliseconds limit, Time now)
    : interval_(std::max(std::clamp(limit / 20, milliseconds(50), milliseconds(1000)),
                         milliseconds(size))),
      limit_(std::max(limit, 5 * interval_)),
      seen_(static_cast<size_t>(size), Seen{"", now, now}),
      last_merge_(now) {
  for (int i = 1; i < size; ++i) {
    all_.push_back((rank + i) % size);
  }
  neighbours_.assign(all_.begin(), all_.begin() + std::min(kNeighbours, size - 1));
}

const std::vector<int>& BeatWatch::due(bool all, Time now) {
  if (!all || now - last_all_ < milliseconds(5) * seen_.size()) {
    return neighbours_;
  }
  last_all_ = now;
  return all_;
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
